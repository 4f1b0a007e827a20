"""Messages of every method, built from the descriptors: most are what a client would send next, some have fields at and
beyond their bounds.
"""

from math import inf, nan
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from buffer_service.domain.presets import PRESETS
from buffer_service.rpc.server import _CONTRACT
from rollout_buffer.v1 import common_pb2
from tests.fuzz.world import World
from tests.support.rpc import make_group, make_plan, make_task, manifest
from tests.support.written import claim_check

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for module in (*_CONTRACT, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

INTEGERS = (0, 1, 2, 255, 4_096, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 43) - 1, 1 << 43, 1 << 48, 1 << 53)
INTEGERS_64 = ((1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, 3.4e38, inf, -inf, nan)
TEXTS = ("", "a", "a\0b", "a\nb", "../../etc/passwd", "/", "{x}", "é" * 64, "\U0001f600", "a" * 64, "a" * 65, "a" * 129)
LONG_TEXT = "x" * 70_000

_SIGNED = (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32)
_SIGNED_64 = (FieldDescriptor.TYPE_INT64, FieldDescriptor.TYPE_SINT64, FieldDescriptor.TYPE_SFIXED64)


class Maker:
    """Makes the requests of one world."""

    def __init__(self, rng: Random, world: World) -> None:
        self.rng = rng
        self.world = world

    def request(self, path: str) -> Message:
        """A request that might be next, with up to a few fields changed."""
        message: Message = self._like(METHODS[path].input_type)
        for _ in range(self.rng.choice((0, 0, 0, 1, 1, 2, 4))):
            self.change(message)
        return message

    def _like(self, kind: Descriptor, depth: int = 0) -> Any:
        made = self._known(kind.name)
        if made is not None:
            return made
        message = GetMessageClass(kind)()
        oneofs = {oneof.name: self.rng.choice(oneof.fields) for oneof in kind.oneofs if len(oneof.fields) > 1}
        for field in kind.fields:
            oneof = field.containing_oneof
            if oneof is not None and oneof.name in oneofs and field is not oneofs[oneof.name]:
                continue
            if (field.has_presence and field.message_type is None and self.rng.random() < 0.6) or depth > 4:
                continue
            self._fill(message, field, depth)
        return message

    def _fill(self, message: Any, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                return
            if field.is_repeated:
                for _ in range(self.rng.choice((1, 1, 2, 3))):
                    getattr(message, field.name).add().CopyFrom(self._like(field.message_type, depth + 1))
            else:
                getattr(message, field.name).CopyFrom(self._like(field.message_type, depth + 1))
        elif field.is_repeated:
            getattr(message, field.name).extend(self._plausible(field) for _ in range(self.rng.choice((0, 1, 1, 2))))
        else:
            setattr(message, field.name, self._plausible(field))

    def _known(self, name: str) -> Message | None:
        rng, world = self.rng, self.world
        version = common_pb2.WeightVersion(term=world.term, version=world.version)
        makers: dict[str, Any] = {
            "RunRef": lambda: common_pb2.RunRef(run_id=world.run_id, seen_revision=rng.choice((0, world.revision))),
            "Task": lambda: make_task(world.task_id(rng), environment=rng.choice(("", "sums", "code"))),
            "Group": lambda: self._group(version),
            "WeightManifest": lambda: manifest(url=f"/weights/{world.version}"),
            "CollectivePlan": lambda: make_plan(world.version + 1, world.term),
            "RunPolicy": lambda: world.policy(rng),
            "WeightVersion": lambda: version,
        }
        return makers[name]() if name in makers else None

    def _group(self, version: common_pb2.WeightVersion) -> Message:
        task_id, lease_id, incarnation = self.world.leased(self.rng)
        group = make_group(task_id, lease_id=lease_id, incarnation=incarnation, version=version, lengths=(3, 4))
        # Nobody has written it.
        return claim_check(group) if self.rng.random() < 0.2 else group

    def _plausible(self, field: FieldDescriptor) -> Any:
        if field.enum_type is not None:
            return self.rng.choice(field.enum_type.values).number
        known = self.world.value(self.rng, field.name)
        kind = field.cpp_type
        if field.type == FieldDescriptor.TYPE_BYTES:
            return bytes(32) if field.name == "sha256" else b"state"
        if kind == FieldDescriptor.CPPTYPE_STRING:
            presets = ("", *PRESETS) if field.name == "preset" else ("a",)
            return known if isinstance(known, str) else self.rng.choice(presets)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self.rng.random() < 0.2
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return self.rng.choice((0.5, 1.0))
        return known if isinstance(known, int) else self.rng.choice((0, 1, 1, 2, 10))

    def change(self, message: Any) -> None:
        """Set one field, of it or of a message in it, to something at or beyond its bounds."""
        rng = self.rng
        while True:
            if not message.DESCRIPTOR.fields:
                return
            field = rng.choice(message.DESCRIPTOR.fields)
            if field.message_type is None:
                break
            inner = getattr(message, field.name)
            if field.message_type.GetOptions().map_entry or rng.random() < 0.1:
                message.ClearField(field.name)
                return
            if field.is_repeated:
                if rng.random() < 0.1 and len(inner):
                    for _ in range(rng.choice((1, 40))):
                        inner.add().CopyFrom(inner[0])
                    return
                message = inner[rng.randrange(len(inner))] if len(inner) else inner.add()
            else:
                message = inner
        if rng.random() < 0.1:
            message.ClearField(field.name)
        elif field.is_repeated:
            del getattr(message, field.name)[:]
            getattr(message, field.name).extend([self._extreme(field)] * rng.choice((0, 1, 2, 300)))
        else:
            setattr(message, field.name, self._extreme(field))

    def _extreme(self, field: FieldDescriptor) -> Any:
        rng, kind = self.rng, field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = LONG_TEXT if rng.random() < 0.02 else rng.choice(TEXTS)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice(FLOATS)
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 99, (1 << 31) - 1, -1))
        signed, wide = (
            field.type in (*_SIGNED, *_SIGNED_64),
            kind
            in (
                FieldDescriptor.CPPTYPE_INT64,
                FieldDescriptor.CPPTYPE_UINT64,
            ),
        )
        bits = (64 if wide else 32) - signed
        value = rng.choice((*INTEGERS, *INTEGERS_64))
        value = min(value, (1 << bits) - 1)
        return -value if signed and rng.random() < 0.5 else value

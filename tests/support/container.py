"""Containers from a layout of images, as the chart would have a node run them, without a container runtime.

The image is unpacked once. A container has namespaces of mounts and of processes. Its root is the image's, read-only,
with the chart's volumes on it. Its first process is the image's entrypoint, with the chart's arguments and environment.
It is of the chart's user and has no capability. Its network is one that a test has made. Takes root and util-linux.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from tests.chart.helm import NAMESPACE, RELEASE, Pod, environment, render_with
from tests.support.namespaces import CLIENTS, SERVICE, namespaces
from tests.support.processes import children
from tests.support.sentinels import free_port
from tests.support.service import ServiceProcess
from tests.support.store_server import StoreServer

LAYOUT = "RB_TEST_IMAGES"
"""Environment variable with the layout that `make images` writes; services of tests are then of its image."""

HOST = f"{RELEASE}-rollout-buffer.{NAMESPACE}.svc"
"""Name of the chart's Service."""

CONTAINER = """
set -eu
root=$1 user=$2 directory=$3 chroot=$4
shift 4
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
    mount --bind "$1" "$root$2"
    shift 2
done
shift
mount -o remount,bind,ro "$root"
exec "$chroot" "$root" setpriv --reuid "$user" --regid "$user" --clear-groups \\
    --inh-caps=-all --bounding-set=-all --no-new-privs -- env --chdir "$directory" "$@"
"""


@functools.cache
def unpacked(image: str) -> tuple[Path, Mapping[str, Any]]:
    """Root file system of an image, and its configuration. Skips the test where that is not possible."""
    layout = os.environ.get(LAYOUT)
    if layout is None:
        pytest.skip(f"{LAYOUT} names no layout of images: make test-images")
    if os.geteuid() != 0 or shutil.which("umoci") is None or shutil.which("unshare") is None:
        pytest.skip("containers take root, umoci and unshare")
    folder = Path(tempfile.mkdtemp(prefix="rbt-image-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:{image}", folder / "bundle"], check=True, timeout=120)
    return folder / "bundle/rootfs", configuration(Path(layout), image)


def configuration(layout: Path, image: str) -> Mapping[str, Any]:
    """Return the configuration of an image of a layout."""

    def content(digest: str) -> Any:
        return json.loads((layout / "blobs" / digest.replace(":", "/")).read_text())

    named = {each["annotations"]["org.opencontainers.image.ref.name"]: each["digest"] for each in index(layout)}
    found: Mapping[str, Any] = content(content(named[image])["config"]["digest"])
    return found


def index(layout: Path) -> list[dict[str, Any]]:
    """Return the descriptors of a layout."""
    found: list[dict[str, Any]] = json.loads((layout / "index.json").read_text())["manifests"]
    return found


def rendered(folder: Path, component: str, values: Mapping[str, object]) -> Pod:
    """Render the chart with values, and return the pod of a component."""
    done = render_with(folder, yaml.safe_dump(values))
    assert done.returncode == 0, done.stderr
    for document in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader):
        labels = document and document["metadata"].get("labels", {})
        if document and "template" in document.get("spec", {}) and labels["app.kubernetes.io/component"] == component:
            template = document["spec"]["template"]
            return Pod(document, template["metadata"], template["spec"])
    raise AssertionError(f"the chart has no pod of {component}")


def command(name: str, pod: Pod, folder: Path, **fields: str) -> tuple[list[str], dict[str, str]]:
    """The command and environment that start a pod's container, of the image of its name.

    Its volumes lie in `folder`; those that are there already hold what a ConfigMap does. `fields`: variables that name
    what is known of a pod that runs. The chart's Service is found by its name, at SERVICE.
    """
    root, config = unpacked(name)
    container = pod.container(name)
    security, user = container["securityContext"], pod.spec["securityContext"]["runAsUser"]
    assert security["readOnlyRootFilesystem"] is True
    assert (security["capabilities"], security["allowPrivilegeEscalation"]) == ({"drop": ["ALL"]}, False)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{SERVICE} {HOST}\n")
    mounts = [str(folder / "hosts"), "/etc/hosts"]
    for mount in container["volumeMounts"]:
        volume = folder / mount["name"]
        mounts += [str(volume), mount["mountPath"]]
        if not mount.get("readOnly", False):
            volume.mkdir(exist_ok=True)
            # As the node makes an emptyDir of a pod with an fsGroup.
            os.chown(volume, 0, pod.spec["securityContext"]["fsGroup"])
            volume.chmod(0o2777)
    given = dict(each.split("=", 1) for each in config["config"]["Env"]) | environment(container) | fields
    arguments = container.get("args") or config["config"]["Cmd"]
    for variable, value in given.items():
        arguments = [each.replace(f"$({variable})", value) for each in arguments]
    begin = [
        str(shutil.which("unshare")), "--mount", "--pid", "--fork", "--kill-child",
        str(shutil.which("sh")), "-c", CONTAINER, "sh", str(root), str(user),
        container.get("workingDir") or config["config"].get("WorkingDir") or "/", str(shutil.which("chroot")),
    ]  # fmt: skip
    entry = container.get("command") or config["config"]["Entrypoint"]
    return [*begin, *mounts, "--", *entry, *arguments], given


def terminate(pid: int) -> None:
    """SIGTERM to a container's first process; `pid` is that of the command that started it, and waits outside."""
    for first in children(pid):
        os.kill(first, signal.SIGTERM)


class ServiceContainer(ServiceProcess):
    """The service's image under the chart's command line, user, ports and read-only root; at SERVICE.

    `settings` are the chart's. `within`: a command that enters the network.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object], store: str, within: Sequence[str]) -> None:
        super().__init__(folder / "volumes/data", within=within)
        self.folder = folder
        self.pod = rendered(
            folder,
            "service",
            {
                "security": {"insecure": True},
                "store": {"mode": "external", "external": {"url": store}},
                "service": {"settings": dict(settings)},
            },
        )

    @property
    def address(self) -> str:
        return f"{SERVICE}:{self._port('grpc')}"

    @property
    def admin(self) -> str:
        return f"http://{SERVICE}:{self._port('admin')}"

    def _port(self, name: str) -> int:
        ports = self.pod.container("service")["ports"]
        return next(int(port["containerPort"]) for port in ports if port["name"] == name)

    def _command(self) -> tuple[Sequence[str], Mapping[str, str]]:
        started, environment = command("service", self.pod, self.folder / "volumes")
        return [*self.within, *started], environment

    def _terminate(self) -> None:
        assert self.process is not None
        terminate(self.process.pid)


@contextlib.contextmanager
def running_container(folder: Path, **settings: object) -> Iterator[ServiceContainer]:
    """A service from the image at an address of its own, and a store that it reaches over its network."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    with (
        namespaces(clients_here=True) as network,
        StoreServer("--port", str(port), "--bind", CLIENTS, "--protected-mode", "no"),
    ):
        service = ServiceContainer(folder, settings, f"redis://{CLIENTS}:{port}/0", network.service)
        service.start()
        try:
            yield service
        finally:
            service.stop()

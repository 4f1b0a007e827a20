"""Our trainer with a defect: `broken_trainer.py DEFECT ADDRESS RUN`."""

import sys
from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from buffer_wire.errors import StaleTerm
from rollout_buffer.v1.common_pb2 import RunRef
from tests.conformance.our_trainer import main, train
from trainer_client.client import requests
from trainer_client.client.blocking import BufferClient
from trainer_client.client.operations import ServiceClient


def resumes_anew() -> None:
    def resume(client: ServiceClient, run_id: str, **fields: Any) -> Any:
        def build(ref: RunRef) -> Message:
            return requests.resume(run_id, **fields).build(ref)

        return client._call(replace(requests.resume(run_id, **fields), build=build))

    ServiceClient.resume = resume


def fights() -> None:
    address, run_id = sys.argv[1:]
    with BufferClient(address) as client:
        try:
            train(client, run_id)
        except StaleTerm:
            client.resume(run_id)
    sys.exit(1)


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    main(*sys.argv[1:])

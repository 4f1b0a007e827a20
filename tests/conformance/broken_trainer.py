"""Our trainer with a defect: `broken_trainer.py DEFECT ADDRESS RUN`."""

import sys
from dataclasses import replace
from typing import Any

from buffer_wire.errors import StaleEpoch
from tests.conformance.our_trainer import main, train
from trainer_client.client import requests
from trainer_client.client.blocking import BufferClient


def resumes_anew() -> None:
    resume = requests.resume

    def anew(run_id: str, **fields: Any) -> Any:
        return replace(resume(run_id, **fields), build=lambda ref: resume(run_id, **fields).build(ref))

    requests.resume = anew


def fights() -> None:
    address, run_id = sys.argv[1:]
    with BufferClient(address) as client:
        try:
            train(client, run_id)
        except StaleEpoch:
            client.resume(run_id)
    sys.exit(1)


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    main(*sys.argv[1:])

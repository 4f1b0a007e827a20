"""Imports every generated module and trainer_client, and takes one message over the wire format and back."""

import importlib
import pkgutil

import google.protobuf
import grpc

import rollout_buffer.v1

names = sorted(m.name for m in pkgutil.iter_modules(rollout_buffer.v1.__path__, "rollout_buffer.v1."))
for name in [*names, "trainer_client"]:
    importlib.import_module(name)

runs_pb2 = importlib.import_module("rollout_buffer.v1.runs_pb2")
request = runs_pb2.CreateRunRequest(run_id="matrix")
if runs_pb2.CreateRunRequest.FromString(request.SerializeToString()) != request:
    raise SystemExit("a message did not survive serialisation")
print(f"  {len(names)} generated modules under protobuf {google.protobuf.__version__}, grpcio {grpc.__version__}")

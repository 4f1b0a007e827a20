"""Wrong values are refused before anything reaches a cluster, and the message says what is wrong."""

from pathlib import Path

import pytest

from tests.chart.helm import MAJORS, render_with

OPEN = "security: {insecure: true}\n"
BARE_POOL = OPEN + "workers: [{name: w, run: r, %s}]\n"
POOL = OPEN + "workers: [{name: w, run: r, options: {reward: 'm:f'}, engine: {sidecar: {model: m}}, %s}]\n"

SECURED = "security: {tls: {source: secret, secret: s%s}, tokens: {secret: t}}\nworkers: [{name: w, run: r, "

RELAY = OPEN + "relay: {enabled: true, upstreams: ['http://t:1'], %s}"

LONG = POOL.replace("name: w", "name: twelve-chars") + "\nfullnameOverride: %s"

LAUNCH = (
    OPEN + "workers: [{name: w, run: a, options: {reward: 'm:f'}, resources: {limits: {memory: 16Gi}}, "
    "engine: {source: launch, %s}}]"
)

BY_SCHEMA = {
    "a misspelt name": (OPEN + "service: {replica: 2}", "replica"),
    "an unknown setting": (OPEN + "service: {settings: {max_messages: 1}}", "max_messages"),
    "a setting that the chart gives": (OPEN + "service: {settings: {store: 'redis://x'}}", "store"),
    "a setting that has a value of its own": (
        OPEN + "service: {settings: {direct_payloads: true}}",
        "direct_payloads",
    ),
    "an address without port": (OPEN + "service: {directPayloads: {address: host}}", "address"),
    "a setting out of bounds": (OPEN + "service: {settings: {rpc_processes: 65}}", "64"),
    "a setting of another type": (OPEN + "service: {settings: {drain_grace_s: soon}}", "drain_grace_s"),
    "no replica": (OPEN + "service: {replicas: 0}", "replicas"),
    "payloads at one server": (OPEN + "store: {payloads: {url: 'redis://h:6379/0'}}", "payloads"),
    "a password in a cluster's URL": (OPEN + "store: {payloads: {url: 'redis+cluster://:pw@h:6379'}}", "payloads"),
    "a password in a URL": (OPEN + "store: {mode: external, external: {url: 'redis://:pw@h:6379/0'}}", "url"),
    "another store": (OPEN + "store: {mode: raft}", "mode"),
    "two shards, of which one is no majority": (OPEN + "store: {mode: cluster, cluster: {shards: 2}}", "shards"),
    "two Sentinels": (OPEN + "store: {mode: sentinel, sentinel: {replicas: 2}}", "replicas"),
    "hasty Sentinels": (OPEN + "store: {sentinel: {downAfterMs: 1000}}", "downAfterMs"),
    "memory without a unit": (OPEN + "store: {maxmemory: '2000000'}", "maxmemory"),
    "fsync every second": (OPEN + "store: {durability: everysec}", "durability"),
    "a pool without a run": (OPEN + "workers: [{name: w}]", "run"),
    "a pool with a long name": (OPEN + "workers: [{name: a-name-of-more-than-20, run: r}]", "name"),
    "an unknown option": (BARE_POOL % "options: {group_per_engine: 4}", "group_per_engine"),
    "an option out of bounds": (BARE_POOL % "options: {groups_per_engine: 257}", "256"),
    "an option that the chart gives": (BARE_POOL % "options: {worker_id: x}", "worker_id"),
    "another pause mode": (BARE_POOL % "options: {pause_mode: retry}", "pause_mode"),
    "an engine of another kind": (BARE_POOL % "engine: {source: vllm}", "source"),
    "a device that is not known": (BARE_POOL % "engine: {launch: {device: tpu}}", "device"),
    "half a GPU": (BARE_POOL % "engine: {gpus: 0.5}", "gpus"),
    "a relay's upstream without a scheme": (OPEN + "relay: {upstreams: ['trainer:8000']}", "upstreams"),
    "a port out of range": (BARE_POOL % "weights: {servePort: 70000}", "servePort"),
}

BY_TEMPLATE = {
    "a relay of nobody": (OPEN + "relay: {enabled: true}", "relay.upstreams"),
    "a relay on a claim without a name": (RELAY % "storage: {volume: claim}", "relay.storage.claim"),
    "a relay that fills its volume": (RELAY % "maxGb: 140", "do not fit into relay.storage.size"),
    "a relay that would be sent a token in plain text": (
        (SECURED % "").replace("secret: t}}", "secret: t}, weights: {token: {secret: w}}}")
        + "token: {secret: x}, options: {reward: 'm:f'}, engine: {source: simulate}}]\n"
        + "relay: {enabled: true, upstreams: ['https://t:1']}",
        "relay.tls.secret",
    ),
    "a pod that serves weights behind a token": (
        (SECURED % "").replace("secret: t}}", "secret: t}, weights: {token: {secret: w}}}")
        + "token: {secret: x}, options: {reward: 'm:f'}, engine: {source: simulate}, weights: {servePort: 1}}]",
        "weights.servePort",
    ),
    "nobody is asked for a token": ("{}", "security.insecure=true"),
    "a certificate without tokens": ("security: {tls: {source: secret, secret: s}}", "security.tokens.secret"),
    "tokens without a certificate": ("security: {tokens: {secret: s}}", "security.tls.source"),
    "both secured and not": (
        "security: {insecure: true, tls: {source: secret, secret: s}, tokens: {secret: t}}",
        "contradicts",
    ),
    "TLS without its Secret": ("security: {tls: {source: secret}, tokens: {secret: t}}", "security.tls.secret"),
    "cert-manager without an issuer": (
        "security: {tls: {source: cert-manager}, tokens: {secret: t}}",
        "security.tls.issuer.name",
    ),
    "mutual TLS without the workers' Secret": (
        SECURED % ", mutual: true" + "token: {secret: x}, options: {reward: 'm:f'}, engine: {source: simulate}}]",
        "security.tls.clientSecret",
    ),
    "a worker without a token": (
        SECURED % "" + "options: {reward: 'm:f'}, engine: {source: simulate}}]",
        "token.secret",
    ),
    "a monitor without a token": (
        SECURED % "" + "token: {secret: x}, options: {reward: 'm:f'}, engine: {source: simulate}}]\n"
        "metrics: {serviceMonitor: {enabled: true}}",
        "metrics.serviceMonitor.token.secret",
    ),
    "an external store without address": (OPEN + "store: {mode: external}", "store.external"),
    "an external store with two addresses": (
        OPEN + "store: {mode: external, external: {url: 'redis://h', secret: s}}",
        "not both",
    ),
    "an authority for a store without TLS": (
        OPEN + "store: {mode: external, external: {url: 'redis://h', ca: {secret: s}}}",
        "store.external.ca",
    ),
    "payloads on a cluster of the chart's and one of somebody else's": (
        OPEN + "store: {payloads: {bundled: true, url: 'redis+cluster://h'}}",
        "store.payloads.bundled",
    ),
    "payloads apart from a store that is a cluster": (
        OPEN + "store: {mode: cluster, payloads: {bundled: true}}",
        "store.payloads",
    ),
    "clients at a cluster without password": (
        OPEN + "store: {mode: cluster}\nservice: {directPayloads: {enabled: true}}",
        "store.auth.secret",
    ),
    "one address of the chart's cluster": (
        OPEN + "store: {mode: cluster, auth: {secret: p}}\nservice: {directPayloads: {enabled: true, address: 'a:1'}}",
        "service.directPayloads.address",
    ),
    "payloads in plain text on the chart's cluster, beside TLS": (
        SECURED % "" + "token: {secret: x}, options: {reward: 'm:f'}, engine: {source: simulate}}]\n"
        "store: {mode: external, external: {url: 'rediss://h'}, auth: {secret: p}, payloads: {bundled: true}}\n"
        "service: {directPayloads: {enabled: true}}",
        "service.directPayloads.plainText=true",
    ),
    "a pool named as the shards": (OPEN + "workers: [{name: shards, run: a}]", "taken by the chart"),
    "payloads at two addresses": (
        OPEN + "store: {payloads: {url: 'redis+cluster://h', secret: s}}",
        "store.payloads",
    ),
    "an authority for payloads without TLS": (
        OPEN + "store: {payloads: {url: 'redis+cluster://h', ca: {secret: s}}}",
        "store.payloads.ca",
    ),
    "two authorities": (
        OPEN
        + "store: {mode: external, external: {secret: a, ca: {secret: one}}, payloads: {secret: b, ca: {secret: two}}}",
        "one file",
    ),
    "one address of a cluster": (
        OPEN + "store: {payloads: {url: 'redis+cluster://h'}}\n"
        "service: {directPayloads: {enabled: true, address: 'a:1'}}",
        "service.directPayloads.address",
    ),
    "one address of a cluster with runs": (
        OPEN + "store: {mode: external, external: {url: 'redis+cluster://h:1,i:1'}}\n"
        "service: {directPayloads: {enabled: true, address: 'a:1'}}",
        "service.directPayloads.address",
    ),
    "payloads beside a cluster with runs": (
        OPEN + "store: {mode: external, external: {url: 'redis+cluster://h'}, payloads: {url: 'redis+cluster://i'}}",
        "payloads lie there too",
    ),
    "clients at a store without password": (
        OPEN + "service: {directPayloads: {enabled: true}}",
        "store.auth.secret",
    ),
    "payloads in plain text beside TLS": (
        SECURED % "" + "token: {secret: x}, options: {reward: 'm:f'}, engine: {source: simulate}}]\n"
        "store: {auth: {secret: p}}\nservice: {directPayloads: {enabled: true}}",
        "service.directPayloads.plainText=true",
    ),
    "users of the operator's for the bundled store": (
        OPEN + "store: {auth: {secret: p}}\nservice: {directPayloads: {enabled: true, users: {secret: u}}}",
        "service.directPayloads.users",
    ),
    "two pools of one name": (
        OPEN + "workers: [{name: w, run: a, options: {reward: 'm:f'}}, {name: w, run: b, options: {reward: 'm:f'}}]",
        "two pools",
    ),
    "a pool named as the store": (OPEN + "workers: [{name: store, run: a}]", "taken by the chart"),
    "a worker without reward": (OPEN + "workers: [{name: w, run: a, engine: {source: simulate}}]", "reward"),
    "no model": (OPEN + "workers: [{name: w, run: a, options: {reward: 'm:f'}}]", "engine.sidecar.model"),
    "launched engines that are killed for memory": (
        OPEN + "workers: [{name: w, run: a, options: {reward: 'm:f'}, "
        "engine: {source: launch, launch: {model_path: /m}}}]",
        "resources.limits.memory: 4Gi is no more than engine.shmSize (8Gi)",
    ),
    "GPUs that cannot be divided": (LAUNCH % "gpus: 3, launch: {model_path: /m, engines: 2}", "cannot be divided"),
    "two workers for one server": (
        OPEN + "workers: [{name: w, run: a, replicas: 2, options: {reward: 'm:f'}, "
        "engine: {source: urls, urls: ['http://a:1']}}]",
        "a server has one worker",
    ),
    "volumes for pods without names": (POOL % "kind: Deployment, weights: {volume: template}", "kind=StatefulSet"),
    "a claim without name": (POOL % "weights: {volume: claim}", "weights.claim"),
    "ports the wrong way round": (POOL % "collective: {enabled: true, portRange: {from: 3000, to: 2000}}", "from"),
    "a StatefulSet with a name of 53 characters": (
        LONG % ("kind: StatefulSet", "f" * 40),
        "name: the StatefulSet",
    ),
    "weights at the engine's port": (POOL % "weights: {servePort: 30000}", "engine.sidecar.port"),
    "a route without a host": (OPEN + "service: {outside: {kind: Ingress}}", "service.outside.host"),
    "a route without a Gateway": (
        OPEN + "service: {outside: {kind: GRPCRoute, host: rb.example}}",
        "service.outside.parentRefs",
    ),
    "nodes of an engine in a StatefulSet": (
        OPEN + "workers: [{name: w, run: r, options: {reward: 'm:f'}, engine: {nodes: 2, sidecar: {model: m}}}]",
        "engine.nodes",
    ),
    "an engine of one node in a LeaderWorkerSet": (POOL % "kind: LeaderWorkerSet", "engine.nodes"),
    "nodes without common weights": (
        OPEN + "workers: [{name: w, run: r, kind: LeaderWorkerSet, options: {reward: 'm:f'}, "
        "engine: {nodes: 2, sidecar: {model: m}}}]",
        "weights.volume",
    ),
    "backups without a claim": (OPEN + "store: {backup: {enabled: true}}", "store.backup.claim"),
    "backups of a cluster": (OPEN + "store: {mode: cluster, backup: {enabled: true, claim: c}}", "not of mode cluster"),
    "no pod without KEDA": (POOL % "autoscaling: {enabled: true, minReplicas: 0}", "autoscaling.by keda"),
    "a label that selects": (
        POOL % "podLabels: {app.kubernetes.io/name: x}",
        "app.kubernetes.io/name is the chart's own",
    ),
    "metrics at the port of weights": (POOL % "weights: {servePort: 9100}, metricsPort: 9100", "metricsPort 9100"),
    "a monitor of pools without metrics": (
        POOL % "metricsPort: 0" + "\nmetrics: {podMonitor: {enabled: true}}",
        "metricsPort",
    ),
    "weights at a port of collectives": (
        POOL % "weights: {servePort: 20005}, collective: {enabled: true}",
        "weights.servePort: 20005",
    ),
    "an engine at a port of collectives": (
        POOL % "collective: {enabled: true, portRange: {from: 29000, to: 31000}}",
        "engine.sidecar.port: 30000",
    ),
    "workers that the policy would shut out": (
        POOL % "collective: {enabled: true, hostNetwork: true}",
        "networkPolicy.trainers",
    ),
    "an autoscaler without metric": (
        OPEN + "service: {autoscaling: {enabled: true, cpuUtilization: null}}",
        "service.autoscaling",
    ),
    "a setting as variable": (OPEN + "service: {extraEnv: [{name: RB_STORE, value: x}]}", "service.settings"),
    "an option as variable": (POOL % "extraEnv: [{name: RB_ADDRESS, value: x}]", "RB_ADDRESS"),
    "an image that moves": (OPEN + "service: {image: {tag: latest}}", "latest"),
}


@pytest.mark.parametrize(("values", "named"), BY_SCHEMA.values(), ids=BY_SCHEMA)
def test_the_schema_refuses(tmp_path: Path, values: str, named: str) -> None:
    done = render_with(tmp_path, values)

    assert done.returncode != 0
    assert "schema" in done.stderr
    assert named in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("values", "named"), BY_TEMPLATE.values(), ids=BY_TEMPLATE)
def test_the_templates_refuse(tmp_path: Path, values: str, named: str) -> None:
    done = render_with(tmp_path, values)

    assert done.returncode != 0
    assert "schema" not in done.stderr
    assert named in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "values",
    [
        LONG % ("kind: StatefulSet", "f" * 39),
        LONG % ("kind: Deployment", "f" * 40),
        LAUNCH % "shmSize: 15Gi, launch: {model_path: /m}",
        LAUNCH.replace("16Gi", "'17179869184'") % "shmSize: 15Gi, launch: {model_path: /m}",
        POOL % "weights: {servePort: 30001}, collective: {enabled: false, portRange: {from: 30000, to: 31000}}",
    ],
    ids=["52 characters", "a Deployment of 53", "15 of 16 GiB", "15 GiB of bytes", "ports of collectives that are off"],
)
def test_what_just_fits_is_rendered(tmp_path: Path, values: str) -> None:
    done = render_with(tmp_path, values)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("major", MAJORS)
def test_both_majors_name_the_value_that_the_schema_refuses(tmp_path: Path, major: int) -> None:
    done = render_with(tmp_path, OPEN + "service: {settings: {rpc_processes: 65}}", major)

    assert done.returncode != 0
    assert "rpc_processes" in done.stderr

"""Labels that an organisation puts on everything reach it, and no selector."""

from tests.chart.helm import VALUE_SETS, documents

(LABELS,) = [path for path in VALUE_SETS if path.name == "labels-values.yaml"]

PODS = ("Deployment", "StatefulSet")


def test_common_labels_are_on_every_object_and_pod_and_in_no_selector() -> None:
    common = {"team": "rl", "cost-centre": "42"}
    own = [one for one in documents(LABELS) if one["metadata"]["name"].rpartition("-")[2] not in ("own", "text")]
    assert len(own) > 10
    for one in own:
        assert common.items() <= one["metadata"]["labels"].items(), one["metadata"]["name"]
    for one in documents(LABELS, *PODS):
        assert one["spec"]["template"]["metadata"]["labels"].keys() >= common.keys()
        assert not common.keys() & one["spec"]["selector"]["matchLabels"].keys()


def test_pods_have_the_labels_of_their_part_before_those_of_all() -> None:
    tiers = {
        one["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"]["metadata"]["labels"]
        for one in documents(LABELS, *PODS)
    }
    assert {part: labels["tier"] for part, labels in tiers.items()} == {
        "service": "front",
        "store": "data",
        "relay": "weights",
        "worker": "gpu",
    }
    assert tiers["worker"]["team"] == "reasoning"


def test_pool_waits_in_its_queue_and_spreads_as_told() -> None:
    (pool,) = [one for one in documents(LABELS, "StatefulSet") if one["metadata"]["name"].endswith("-math")]
    assert pool["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    (spread,) = pool["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "topology.kubernetes.io/zone"


def test_objects_of_ones_own_may_have_templates() -> None:
    found = {one["metadata"]["name"]: one["data"] for one in documents(LABELS, "ConfigMap")}
    assert [data for name, data in found.items() if name.endswith("-own")] == [{"run": "math"}]
    assert [data for name, data in found.items() if name.endswith("-text")] == [{"a": "b"}]

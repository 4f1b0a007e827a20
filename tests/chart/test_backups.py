"""Backups of the bundled store and their restore, by the chart's script with real servers."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chart.helm import VALUE_SETS, documents, pods_of
from tests.chart.store_pod import RUN, StorePod, until
from tests.support.sentinels import free_port

(BACKUP,) = [path for path in VALUE_SETS if path.name == "store-backup-values.yaml"]
HOST = "127.0.0.1"


class Backed(StorePod):
    """A pod whose script is run to its end as well."""

    def run(self, mode: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the script."""
        return subprocess.run(
            ["/bin/sh", str(RUN), mode],
            env={**self.environment, "DATA": str(self.volume), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def up(self, *modes: str) -> None:
        self.start(*modes)
        until(lambda: self.ask("PING") == "PONG", "it answers", [self])


@pytest.fixture
def backups(tmp_path: Path) -> Path:
    folder = tmp_path / "backups"
    folder.mkdir()
    return folder


@pytest.fixture
def pods(programs: Path, tmp_path: Path) -> Iterator[list[Backed]]:
    ports = (free_port(), free_port())
    made = [Backed(programs, tmp_path / name, HOST, ports, (HOST,)) for name in ("old", "new")]
    yield made
    for pod in made:
        pod.kill()


@pytest.mark.parametrize("modes", [("server",), ("replicated", "sentinel")])
def test_restored_server_has_what_the_backup_had_and_keeps_it(
    pods: list[Backed], backups: Path, modes: tuple[str, ...]
) -> None:
    old, new = pods
    old.up(*modes)
    old.ask("SET", "early", "1")
    source = {"FROM": HOST, "HOSTS": ""} if modes == ("server",) else {}
    done = old.run("backup", BACKUPS=str(backups), KEEP="2", **source)
    assert done.returncode == 0, done.stderr
    (written,) = backups.iterdir()
    old.ask("SET", "late", "1")
    old.kill()

    restored = new.run("restore", BACKUPS=str(backups), RESTORE=written.name)
    assert restored.returncode == 0, restored.stderr
    assert "has 1 keys" in restored.stderr
    new.up("server")
    assert (new.ask("GET", "early"), new.ask("GET", "late")) == ("1", "")
    new.ask("SET", "after", "1")
    new.kill()
    new.up("server")
    assert (new.ask("GET", "early"), new.ask("GET", "after")) == ("1", "1")


def test_only_the_newest_backups_are_kept_and_parts_of_broken_ones_go(pods: list[Backed], backups: Path) -> None:
    pod = pods[0]
    for name in ("20200101T000000Z.rdb", "20200102T000000Z.rdb", "20200103T000000Z.rdb.part", "mine.txt"):
        (backups / name).write_text("x")
    pod.up("server")
    done = pod.run("backup", BACKUPS=str(backups), KEEP="2", FROM=HOST, HOSTS="")
    assert done.returncode == 0, done.stderr
    left = sorted(path.name for path in backups.iterdir())
    assert left[0] == "20200102T000000Z.rdb"
    assert left[2:] == ["mine.txt"]
    assert len(left) == 3


def test_backup_of_a_server_that_is_away_fails_and_deletes_nothing(pods: list[Backed], backups: Path) -> None:
    (backups / "20200101T000000Z.rdb").write_text("x")
    done = pods[0].run("backup", BACKUPS=str(backups), KEEP="1", FROM=HOST, HOSTS="")
    assert done.returncode != 0
    assert [path.name for path in backups.iterdir() if path.suffix == ".rdb"] == ["20200101T000000Z.rdb"]


def test_restore_touches_no_volume_that_holds_a_store_and_no_other_pod(pods: list[Backed], backups: Path) -> None:
    pod = pods[0]
    pod.up("server")
    pod.ask("SET", "mine", "1")
    pod.kill()
    done = pod.run("restore", BACKUPS=str(backups), RESTORE="missing.rdb")
    assert done.returncode == 0
    assert "holds a store already" in done.stderr
    assert pods[1].run("restore", BACKUPS=str(backups), RESTORE="missing.rdb", POD_NAME="s-1").returncode == 0
    assert pods[1].run("restore", BACKUPS=str(backups), RESTORE="missing.rdb", POD_NAME="s-0").returncode != 0
    pod.up("server")
    assert pod.ask("GET", "mine") == "1"


def test_cron_job_asks_the_store_and_writes_to_the_claim() -> None:
    (job,) = documents(BACKUP, "CronJob")
    spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    (store,) = pods_of(BACKUP, "store")
    given = {one["name"]: one.get("value") for one in container["env"]}
    server = {one["name"]: one.get("value") for one in store.container("server")["env"]}
    assert container["command"] == ["sh", "/scripts/run.sh", "backup"]
    assert given["HOSTS"] == server["HOSTS"]
    assert {one["mountPath"]: one["name"] for one in container["volumeMounts"]}["/backups"] == "backups"
    volumes = {one["name"]: one for one in spec["volumes"]}
    assert volumes["backups"]["persistentVolumeClaim"]["claimName"] == "rb-backups"
    (restore,) = [one for one in store.spec["initContainers"] if one["name"] == "restore"]
    assert restore["command"] == ["sh", "/scripts/run.sh", "restore"]
    assert {"name": "RESTORE", "value": "20261124T000000Z.rdb"} in restore["env"]

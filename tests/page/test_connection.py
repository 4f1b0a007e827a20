"""The page while the service, its store or its token go away and come back."""

import re
from pathlib import Path

import pytest

from buffer_service.security.roles import Role
from buffer_service.security.token_file import changing
from buffer_service.security.tokens import TokenSet
from buffer_service.store.keys import SCHEMA_VERSION
from rollout_buffer.v1 import runs_pb2
from tests.page.browser import Chromium, Screen
from tests.security.guarded import add_token
from tests.support.rpc import TIMEOUT_S, RunRpc, connect
from tests.support.service import running_service
from tests.support.store_server import store_server

pytestmark = pytest.mark.browser


def test_a_restart_is_seen_and_the_page_goes_on(chromium: Chromium, tmp_path: Path) -> None:
    with running_service(tmp_path) as service, Screen.opened(chromium, service.admin) as screen:
        client = connect(service.address)
        run = client.create(batch_groups=2, max_queued_groups=8)
        run.fill(1)
        screen.visit()
        screen.until("#loop", "queue: 1 of 8 groups")
        service.kill()
        screen.until("#connection-state", "disconnected: the service cannot be reached")
        screen.until("#heard", re.compile(r"last heard \d+ s ago"))
        assert "old" in screen.at("#board").get_attribute("class").split()
        service.start()
        screen.until("#connection-state", re.compile("^live$"))
        # The old channel may not have noticed yet that its connection is gone.
        client.channel.close()
        client = connect(service.address)
        RunRpc(client, run.run_id).fill(2, prefix="later")
        screen.until("#loop", "queue: 3 of 8 groups")
        assert "old" not in screen.at("#board").get_attribute("class").split()
        client.channel.close()


def test_a_store_that_fails_is_said_and_numbers_are_marked_old(chromium: Chromium, tmp_path: Path) -> None:
    with store_server("--appendonly", "yes") as store, running_service(tmp_path, store=store.url) as service:
        client = connect(service.address)
        run = client.create(batch_groups=2, max_queued_groups=8)
        run.fill(1)
        with Screen.opened(chromium, service.admin) as screen:
            screen.visit(run.run_id)
            screen.until("#loop", "queue: 1 of 8 groups")
            store.kill()
            screen.until("#fault", "What is shown is old: the store at")
            screen.until("#connection-state", "the store fails")
            store.start()
            screen.until_shown("#fault", shown=False)
            screen.until("#connection-state", re.compile("^live$"))
        client.channel.close()


def test_a_run_of_another_layout_leaves_the_page_to_the_others(chromium: Chromium, tmp_path: Path) -> None:
    with store_server() as store, running_service(tmp_path, store=store.url) as service:
        client = connect(service.address)
        runs = [RunRpc(client, name) for name in ("a-theirs", "b-ours")]
        for run in runs:
            client.runs.CreateRun(runs_pb2.CreateRunRequest(run_id=run.run_id), timeout=TIMEOUT_S)
        runs[1].fill(1)
        store.set_layout("a-theirs", SCHEMA_VERSION + 1)
        with Screen.opened(chromium, service.admin) as screen:
            screen.visit()
            screen.until("#loop", "queue: 1 of")
            screen.visit("a-theirs")
            # What was said of it when nobody had named it is hidden, and still there.
            screen.until_shown("#empty")
            screen.until("#empty-title", "Run a-theirs is not shown")
            screen.until("#empty-next", "layout")
        client.channel.close()


def test_a_token_is_asked_for_kept_in_the_tab_and_missed_when_it_is_revoked(chromium: Chromium, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.jsonl"
    root = add_token(tokens, "root", Role.ADMIN, "*")
    reader = add_token(tokens, "reader", Role.READER, "math-*")
    with running_service(tmp_path, tokens_file=tokens) as service, Screen.opened(chromium, service.admin) as screen:
        create_runs(service.address, root, "math-1", "secret-1")
        screen.visit()
        screen.until_shown("#door")
        assert screen.focused() == "token"
        assert screen.at("#token").get_attribute("type") == "password"
        screen.at("#token").fill("rb.reader.no\u2011header\u2011carries\u2011it")
        screen.page.keyboard.press("Enter")
        screen.until("#token-error", "signs of ASCII alone")
        screen.at("#token").fill("rb.nobody.garbage")
        screen.page.keyboard.press("Enter")
        screen.until("#token-error", "the token is not known to the service")
        screen.at("#token").fill(reader)
        screen.page.keyboard.press("Enter")
        screen.until("#loop", "queue: 0 of")
        assert screen.at("#run option").all_text_contents() == ["math-1"]
        assert reader not in screen.page.content()
        assert reader not in screen.page.url
        kept = screen.page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
        assert kept == [[reader], [], ""]
        screen.page.reload()
        screen.until("#loop", "queue: 0 of")
        screen.visit("secret-1")
        screen.until("#empty-next", "may not do anything to run 'secret-1'")
        screen.at("#run").select_option("math-1")
        screen.until("#loop", "queue: 0 of")
        screen.at("#forget").click()
        screen.until_shown("#door")
        assert (screen.page.title(), "math-1" in screen.page.content()) == ("rollout-buffer", False)
        screen.at("#token").fill(reader)
        screen.page.keyboard.press("Enter")
        screen.until("#loop", "queue: 0 of")
        with changing(tokens) as held:
            held[0] = TokenSet(entry for entry in held[0].entries if entry.token_id != "reader")
        screen.until_shown("#door")
        screen.until_shown("#board", shown=False)
        screen.until("#token-error", re.compile("revoked|not known"))
        # Another window knows nothing of it.
        with Screen.opened(chromium, service.admin) as other:
            other.visit()
            other.until_shown("#door")


def create_runs(address: str, token: str, *run_ids: str) -> None:
    """Create runs by an admin's token."""
    import grpc

    from tests.security.contract import call

    with grpc.insecure_channel(address) as channel:
        for run_id in run_ids:
            assert call(channel, "/rollout_buffer.v1.RunService/CreateRun", token, run_id)[0] is grpc.StatusCode.OK

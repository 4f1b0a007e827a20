"""The command of the live benchmark, without running it."""

import pytest

from bench.lab import live


def test_settings_that_are_not_there_are_refused_before_a_table_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []
    monkeypatch.setattr(live, "put", lambda name, _lines: written.append(name))
    monkeypatch.setattr("sys.argv", ["live", "--only", "no such setting"])
    with pytest.raises(SystemExit):
        live.main()
    assert "no setting has 'no such setting' in its name" in capsys.readouterr().err
    assert written == []

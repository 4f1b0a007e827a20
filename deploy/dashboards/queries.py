"""PromQL of the panels.

Every replica of the service reads a run from the store, so all of them say the same: `of_run` takes the maximum. What
a replica, a worker or an engine counts for itself is added up.
"""

_RUN = 'namespace=~"$namespace",run="$run"'
_SERVICE = 'namespace=~"$namespace"'
RATE = "$__rate_interval"


def of_run(metric: str, *by: str, **labels: str) -> str:
    """A gauge of the chosen run, by these labels; `labels` are matchers: state="queued", or state="~queued|forming"."""
    return _aggregated("max", f"{_selector(metric, _RUN, labels)}", by)


def run_rate(metric: str, *by: str, **labels: str) -> str:
    """Increase in a second of a counter of the chosen run."""
    return _aggregated("max", f"rate({_selector(metric, _RUN, labels)}[{RATE}])", by)


def run_slope(metric: str, *by: str, **labels: str) -> str:
    """Increase in a second of a gauge of the chosen run."""
    return _aggregated("max", f"deriv({_selector(metric, _RUN, labels)}[{RATE}])", by)


def run_quantile(share: float, metric: str, **labels: str) -> str:
    """Quantile of a histogram of the chosen run, of what came in during the panel's interval."""
    return f"histogram_quantile({share}, {run_rate(f'{metric}_bucket', 'le', **labels)})"


def of_processes(metric: str, *by: str, **labels: str) -> str:
    """A gauge of all replicas of the service, added up."""
    return _aggregated("sum", _selector(metric, _SERVICE, labels), by)


def process_rate(metric: str, *by: str, **labels: str) -> str:
    """Increase in a second of a counter of all replicas."""
    return _aggregated("sum", f"rate({_selector(metric, _SERVICE, labels)}[{RATE}])", by)


def process_quantile(share: float, metric: str, *by: str, **labels: str) -> str:
    """Quantile of a histogram of all replicas."""
    return f"histogram_quantile({share}, {process_rate(f'{metric}_bucket', 'le', *by, **labels)})"


def worker_rate(metric: str, *by: str, **labels: str) -> str:
    """Increase in a second of a counter of all workers of the chosen run, 0 before anything of it was counted."""
    counted = _aggregated("sum", f"rate({_selector(f'worker_{metric}', _RUN, labels)}[{RATE}])", by)
    return counted if by else f"({counted} or 0 * {worker_rate('samples_total', 'run')})"


def worker_quantile(share: float, metric: str) -> str:
    """Quantile of a histogram of all workers of the chosen run."""
    return f"histogram_quantile({share}, {worker_rate(f'{metric}_bucket', 'le')})"


def of_workers(metric: str, how: str, *by: str) -> str:
    """A gauge of all workers of the chosen run; `how`: max, avg or sum."""
    return _aggregated(how, _selector(f"worker_{metric}", _RUN, {}), by)


def of_sglang(metric: str, how: str) -> str:
    """A gauge of all SGLang servers of the namespace, which know of no run; `how`: max, avg or sum."""
    return f"{how}(sglang:{metric}{{{_SERVICE}}})"


def of_service(metric: str, *by: str, how: str = "max", **labels: str) -> str:
    """A gauge that all replicas see alike, as the store's memory; `how`: min for what must hold for all of them."""
    return _aggregated(how, _selector(metric, _SERVICE, labels), by)


def _aggregated(how: str, expression: str, by: tuple[str, ...]) -> str:
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def _selector(metric: str, scope: str, labels: dict[str, str]) -> str:
    matchers = [
        f'{name}=~"{value[1:]}"' if value.startswith("~") else f'{name}="{value}"' for name, value in labels.items()
    ]
    return f"rollout_buffer_{metric}{{{','.join([scope, *matchers])}}}"

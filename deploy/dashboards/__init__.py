"""Grafana dashboards of the service, as code; `python -m deploy.dashboards` writes them into the Helm chart.

A file for each dashboard declares its rows of panels, made of the few kinds in `panels.py` with the queries of
`queries.py`; `rendering.py` makes the JSON that Grafana takes.
"""

"""Tests of the controller that holds a target of staleness."""

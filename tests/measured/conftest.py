"""Small models of the tracer's tests, and the command line of the reports' tests."""

from tests.reporting.conftest import kept_targets, run
from tests.tracer.conftest import model, module

__all__ = ["kept_targets", "model", "module", "run"]

from rooftrace.costmodels.advice import (
    GraphBreaks as GraphBreaks,
    Guidance as Guidance,
    Headroom as Headroom,
    Saving as Saving,
    WhatIf as WhatIf,
)
from rooftrace.costmodels.estimates import (
    Estimate as Estimate,
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
)
from rooftrace.costmodels.estimates.rows import Breakdown as Breakdown
from rooftrace.costmodels.explaining import Explanation as Explanation
from rooftrace.costmodels.planning import ExecutionModel as ExecutionModel, Plan as Plan
from rooftrace.costmodels.sweeps import Elasticities as Elasticities, Form as Form, Sweep as Sweep
from rooftrace.errors import RequestError as RequestError, TargetError as TargetError
from rooftrace.hardware import Chip as Chip
from rooftrace.measured.alignment import FusedStep as FusedStep
from rooftrace.measured.bench import Run as Run, RunFileError as RunFileError
from rooftrace.measured.fit import Validation as Validation
from rooftrace.reporting.fleets import SweepFleet as SweepFleet
from rooftrace.reporting.rooflinesteps import Rooflines as Rooflines
from rooftrace.tracer.graph import OpGraph as OpGraph
from rooftrace.tracer.inventory.records import ModelInfo as ModelInfo
from rooftrace.tracer.requests import Request as Request, TraceError as TraceError

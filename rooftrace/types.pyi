from rooftrace.costmodels.advice import (
    GraphBreaks as GraphBreaks,
    Guidance as Guidance,
    Headroom as Headroom,
    Saving as Saving,
    WhatIf as WhatIf,
)
from rooftrace.costmodels.diffs import Diff as Diff
from rooftrace.costmodels.estimates import (
    Comparison as Comparison,
    Estimate as Estimate,
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
)
from rooftrace.costmodels.estimates.moduletree import Summary as Summary
from rooftrace.costmodels.estimates.rows import Breakdown as Breakdown
from rooftrace.costmodels.explaining import Explanation as Explanation
from rooftrace.costmodels.explaining.decode_forms import Exploration as Exploration
from rooftrace.costmodels.knobs import Knobs as Knobs
from rooftrace.costmodels.knobs.numbers import KnobsError as KnobsError
from rooftrace.costmodels.memory import LargestBatch as LargestBatch, Memory as Memory
from rooftrace.costmodels.planning import (
    ExecutionError as ExecutionError,
    ExecutionModel as ExecutionModel,
    Plan as Plan,
)
from rooftrace.costmodels.solving import (
    Disaggregated as Disaggregated,
    MeshAnswer as MeshAnswer,
    ScalingAnswer as ScalingAnswer,
)
from rooftrace.costmodels.solving.rates import (
    PassingAnswer as PassingAnswer,
    RatesAnswer as RatesAnswer,
)
from rooftrace.costmodels.solving.serving import ServingAnswer as ServingAnswer
from rooftrace.costmodels.solving.workloads import CapacityAnswer as CapacityAnswer
from rooftrace.costmodels.sweeps import Elasticities as Elasticities, Form as Form, Sweep as Sweep
from rooftrace.errors import (
    ProfileError as ProfileError,
    RequestError as RequestError,
    TargetError as TargetError,
)
from rooftrace.hardware import Chip as Chip
from rooftrace.hardware.chip import (
    MissingPeakError as MissingPeakError,
)
from rooftrace.hardware.chipfile.reading import UnknownChipError as UnknownChipError
from rooftrace.hardware.systems import System as System
from rooftrace.measured.alignment import FusedStep as FusedStep
from rooftrace.measured.bench import Run as Run, RunFileError as RunFileError
from rooftrace.measured.fit import (
    Calibration as Calibration,
    Validation as Validation,
)
from rooftrace.measured.fit.cases import CalibrationError as CalibrationError
from rooftrace.measured.rundiffs import RunDiff as RunDiff
from rooftrace.reporting.fleets import SweepFleet as SweepFleet
from rooftrace.reporting.habits import Captured as Captured, Profile as Profile
from rooftrace.reporting.reportfolder import Report as Report
from rooftrace.reporting.rooflinesteps import Reports as Reports, Rooflines as Rooflines
from rooftrace.tracer.graph import GraphFileError as GraphFileError, OpGraph as OpGraph
from rooftrace.tracer.inventory import (
    CheckpointDiff as CheckpointDiff,
    ParameterDiff as ParameterDiff,
)
from rooftrace.tracer.inventory.records import ModelInfo as ModelInfo
from rooftrace.tracer.requests import Request as Request, TraceError as TraceError

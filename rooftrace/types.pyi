from rooftrace.costmodels.estimates import (
    Comparison as Comparison,
    Estimate as Estimate,
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
)
from rooftrace.costmodels.estimates.moduletree import Summary as Summary
from rooftrace.costmodels.estimates.rows import Breakdown as Breakdown
from rooftrace.costmodels.fusion import (
    ExecutionError as ExecutionError,
    ExecutionModel as ExecutionModel,
    Plan as Plan,
)
from rooftrace.costmodels.kernels import Knobs as Knobs
from rooftrace.costmodels.kernels.numbers import KnobsError as KnobsError
from rooftrace.costmodels.memory import LargestBatch as LargestBatch, Memory as Memory
from rooftrace.diffs.costs import Diff as Diff
from rooftrace.diffs.runs import RunDiff as RunDiff
from rooftrace.errors import (
    ProfileError as ProfileError,
    RequestError as RequestError,
    TargetError as TargetError,
    TraceError as TraceError,
)
from rooftrace.graph import GraphFileError as GraphFileError, OpGraph as OpGraph
from rooftrace.hardware import Chip as Chip, Host as Host
from rooftrace.hardware.chip import (
    MissingPeakError as MissingPeakError,
)
from rooftrace.hardware.chipfile.reading import UnknownChipError as UnknownChipError
from rooftrace.hardware.systems import System as System
from rooftrace.measured.alignment import FusedStep as FusedStep
from rooftrace.measured.bench import Run as Run
from rooftrace.measured.fit import (
    Calibration as Calibration,
    Validation as Validation,
)
from rooftrace.reporting.commands import SweepFleet as SweepFleet
from rooftrace.reporting.commands.compat import Captured as Captured, Profile as Profile
from rooftrace.reporting.commands.reportfolder import Report as Report
from rooftrace.reporting.commands.rooflinesteps import Reports as Reports, Rooflines as Rooflines
from rooftrace.studies.advice import (
    GraphBreaks as GraphBreaks,
    Guidance as Guidance,
    Headroom as Headroom,
    Saving as Saving,
    WhatIf as WhatIf,
)
from rooftrace.studies.explaining import Explanation as Explanation
from rooftrace.studies.explaining.decode_forms import Exploration as Exploration
from rooftrace.studies.sensitivity import Elasticities as Elasticities
from rooftrace.studies.solving import (
    MeshAnswer as MeshAnswer,
    ScalingAnswer as ScalingAnswer,
    TrainingRun as TrainingRun,
)
from rooftrace.studies.solving.serving import ServingAnswer as ServingAnswer
from rooftrace.studies.solving.workloads import (
    CapacityAnswer as CapacityAnswer,
    PassingAnswer as PassingAnswer,
    RatesAnswer as RatesAnswer,
)
from rooftrace.studies.sweeps import Form as Form, Sweep as Sweep
from rooftrace.tracer import Request as Request
from rooftrace.weights import CheckpointDiff as CheckpointDiff, ParameterDiff as ParameterDiff
from rooftrace.weights.inventory import ModelInfo as ModelInfo

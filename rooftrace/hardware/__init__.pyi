from rooftrace.hardware import units as units
from rooftrace.hardware.chip import (
    Chip as Chip,
    Engine as Engine,
    Fact as Fact,
    MissingPeakError as MissingPeakError,
    Peak as Peak,
)
from rooftrace.hardware.chipfile import (
    ChipFileError as ChipFileError,
    available_chips as available_chips,
    dump_chip as dump_chip,
    lint_chip as lint_chip,
    load_chip as load_chip,
    write_chip as write_chip,
)
from rooftrace.hardware.precisions import (
    PrecisionError as PrecisionError,
    bytes_per_element as bytes_per_element,
    compute_family as compute_family,
    precision as precision,
    storage_bytes as storage_bytes,
    widest as widest,
)
from rooftrace.hardware.units import (
    MISSING as MISSING,
    UnitError as UnitError,
    format_bandwidth as format_bandwidth,
    format_capacity as format_capacity,
    format_count as format_count,
    format_flop_rate as format_flop_rate,
    format_flops as format_flops,
    format_intensity as format_intensity,
    format_share as format_share,
    format_time as format_time,
    format_traffic as format_traffic,
    parse as parse,
)

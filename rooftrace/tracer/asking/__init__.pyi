from rooftrace.tracer.asking.arguments import (
    PRICES as PRICES,
    SIZES as SIZES,
    Asked as Asked,
    UnusedError as UnusedError,
    asked as asked,
    check_call as check_call,
    check_graph as check_graph,
    check_phases as check_phases,
    check_used as check_used,
    is_graph as is_graph,
    is_named as is_named,
    refuse_for_graph as refuse_for_graph,
    sorted_arguments as sorted_arguments,
)
from rooftrace.tracer.asking.request import (
    PHASES as PHASES,
    Inputs as Inputs,
    Loaded as Loaded,
    Loss as Loss,
    Options as Options,
    Request as Request,
    RequestError as RequestError,
    TargetError as TargetError,
    assumed as assumed,
    check_modules as check_modules,
    parse_assumption as parse_assumption,
)
from rooftrace.tracer.asking.targetnames import (
    is_config as is_config,
    names_code as names_code,
)

from rooftrace.tracer.vocabulary.kinds import (
    KINDS as KINDS,
    LOWER_BOUND as LOWER_BOUND,
    PARTS as PARTS,
    REVERSED as REVERSED,
    ROLES as ROLES,
    UNRECORDED as UNRECORDED,
)

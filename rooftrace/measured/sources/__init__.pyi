from rooftrace.measured.sources.kinds import (
    KINDS as KINDS,
    Kind as Kind,
    ProfileError as ProfileError,
    kind_of as kind_of,
)

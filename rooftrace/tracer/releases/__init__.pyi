from rooftrace.tracer.releases.releases import (
    Release as Release,
    installed_release as installed_release,
    read_release as read_release,
)

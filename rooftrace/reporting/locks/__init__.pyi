from rooftrace.reporting.locks import checking as checking, files as files, records as records

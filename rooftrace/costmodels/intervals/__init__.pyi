from rooftrace.costmodels.intervals import residuals as residuals

from rooftrace.tracer.sizing.sizedsource import SizedSource as SizedSource

from rooftrace.tracer.graphfiles.graphfile import (
    GraphFileError as GraphFileError,
    decoded_graph as decoded_graph,
    encoded_graph as encoded_graph,
    graphs_bytes as graphs_bytes,
    load_graphs as load_graphs,
    looks_saved as looks_saved,
    save_graphs as save_graphs,
)

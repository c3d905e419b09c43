"""Read and write files: safetensors by byte range, directories published by one rename, object storage, JSON, text."""

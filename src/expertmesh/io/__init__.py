"""Files: safetensors read and written by byte range, directories published by one rename."""

"""Bodies and routes by noun, as they are read and as the OpenAPI document describes them."""

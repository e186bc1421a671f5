"""The wire: what is asked over HTTP, who may ask it, and how it is answered."""

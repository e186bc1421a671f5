"""The server: connections and their deadlines, both protocols, and hot routes in front of FastAPI."""

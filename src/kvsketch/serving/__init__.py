"""One fixed page of slots per request and layer, for a serving engine: plain torch, no engine."""

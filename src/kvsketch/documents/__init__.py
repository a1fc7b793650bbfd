"""Documents that were compressed once: read, asked, talked about, continued, put together."""

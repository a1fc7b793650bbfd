"""The exit codes of the commands, besides 0."""

import signal

#: wrong options or input
USAGE_ERROR = 2
#: Ctrl-C
INTERRUPTED = 128 + signal.SIGINT

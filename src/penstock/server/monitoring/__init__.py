"""What those who run a server are told of requests and of the moment: log lines, traces, the state that the
page shows."""

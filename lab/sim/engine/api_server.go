package engine

import "time"

// apiServer is the process in front of the engines of one server, which tokenizes one prompt after another.
type apiServer struct {
	tokenTime float64       // nanoseconds for each token of a prompt
	busyUntil time.Duration // when it has handled all prompts so far
}

// handlePrompt returns when a prompt that arrives now has been handled.
func (a *apiServer) handlePrompt(tokens int, now time.Duration) (readyAt time.Duration) {
	a.busyUntil = max(a.busyUntil, now) + time.Duration(a.tokenTime*float64(tokens))
	return a.busyUntil
}

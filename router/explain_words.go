package router

// Why a backend is no candidate, in the words of BackendExplanation.WhyNot.
const (
	notListed    = "does not list the model"
	notReady     = "not ready"
	isDraining   = "draining"
	isStopping   = "about to stop"
	isAsleep     = "asleep"
	hasLeft      = "left the fleet"
	wasTried     = "tried already"
	hasItsMost   = "has max_in_flight requests"
	queueFull    = "refused a request for its full queue"
	breakerOpen  = "breaker open"
	kvFull       = "KV cache all but full"
	tooLongThere = "prompt too long for it"
	isStalled    = "stalled"
	keptFree     = "kept free for interactive requests"
	anotherFirst = "another is tried first, to see whether it has healed"
)

func (t trouble) String() string {
	switch t {
	case pressed:
		return kvFull
	case failing:
		return breakerOpen
	case small:
		return tooLongThere
	case stuck:
		return isStalled
	}
	return anotherFirst
}

func (a absence) String() string {
	switch a {
	case unready:
		return notReady
	case draining:
		return isDraining
	case ending:
		return isStopping
	case asleep:
		return isAsleep
	case triedNow:
		return wasTried
	}
	return hasLeft
}

// Why a request would be held, in the words of BackendExplanation.Held.
func (l lack) String() string {
	switch l {
	case lacksStep:
		return "its next step is full"
	case lacksStart:
		return "requests wait there for room"
	case lacksCache:
		return "its KV cache has no room"
	}
	return ""
}

func (s BreakerState) String() string {
	return [...]string{"closed", "half-open", "open"}[s]
}

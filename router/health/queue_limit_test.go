package health

import (
	"testing"

	"warmroute/backends"
)

// TestQueueLimit plays what happens at a replica whose queue is full. Requests are known by their letters.
func TestQueueLimit(t *testing.T) {
	type step struct {
		at     float64 // seconds
		act    string  // send, refuse, output, end, disconnect, poll (of other clients' requests) or forget
		which  string
		others int64 // requests in flight beside it; of poll: those of other clients
		full   [6]bool
	}
	const no, yes = false, true
	for name, steps := range map[string][]step{
		"an end makes room": {
			{1, "send", "a", 4, [6]bool{}},
			{1, "refuse", "a", 4, [6]bool{no, no, no, no, yes, yes}},
			{1.1, "send", "b", 3, [6]bool{no, no, no, no, yes, yes}},
			{1.1, "output", "b", 3, [6]bool{no, no, no, no, yes, yes}},
		},
		"a burst is refused": {
			{1, "send", "a", 4, [6]bool{}},
			{1, "send", "b", 5, [6]bool{}},
			{1, "refuse", "b", 5, [6]bool{no, no, no, no, no, yes}},
			{1, "refuse", "a", 4, [6]bool{no, no, no, no, yes, yes}},
			{1.2, "", "", 0, [6]bool{no, no, no, no, yes, yes}},
			{1.25, "", "", 0, [6]bool{}},
		},
		"one more is tried, and refused": {
			{1, "send", "a", 2, [6]bool{}},
			{1, "refuse", "a", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{1.25, "send", "b", 2, [6]bool{no, no, no, yes, yes, yes}},
			{1.25, "refuse", "b", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{2.2, "", "", 0, [6]bool{no, no, yes, yes, yes, yes}},
			{2.25, "send", "c", 2, [6]bool{no, no, no, yes, yes, yes}},
			{2.25, "refuse", "c", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{6.2, "", "", 0, [6]bool{no, no, yes, yes, yes, yes}},
			{6.25, "", "", 0, [6]bool{}},
		},
		"one more is tried, and accepted": {
			{1, "send", "a", 2, [6]bool{}},
			{1, "refuse", "a", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{1.25, "send", "b", 2, [6]bool{no, no, no, yes, yes, yes}},
			{1.3, "output", "b", 2, [6]bool{}},
			{1.3, "send", "c", 5, [6]bool{}},
			{1.3, "send", "d", 6, [6]bool{}},
			{1.3, "refuse", "d", 3, [6]bool{no, no, no, yes, yes, yes}},
		},
		"one more is tried, and accepted after another one has ended": {
			{1, "send", "a", 2, [6]bool{}},
			{1, "refuse", "a", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{1.25, "send", "b", 2, [6]bool{no, no, no, yes, yes, yes}},
			{1.3, "end", "c", 2, [6]bool{no, no, no, yes, yes, yes}},
			{1.4, "output", "b", 1, [6]bool{no, no, no, yes, yes, yes}},
			{1.5, "send", "d", 3, [6]bool{no, no, no, no, yes, yes}},
			{1.6, "output", "d", 3, [6]bool{}},
		},
		"one more is tried, and its response is not streamed": {
			{1, "send", "a", 2, [6]bool{}},
			{1, "refuse", "a", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{1.25, "send", "b", 2, [6]bool{no, no, no, yes, yes, yes}},
			{1.3, "end", "b", 2, [6]bool{}},
		},
		"one more is tried, and disconnects": {
			{1, "send", "a", 2, [6]bool{}},
			{1, "refuse", "a", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{1.25, "send", "b", 2, [6]bool{no, no, no, yes, yes, yes}},
			{1.3, "disconnect", "b", 2, [6]bool{no, no, no, yes, yes, yes}},
		},
		"nothing of ours is there": {
			{1, "refuse", "a", 0, [6]bool{yes, yes, yes, yes, yes, yes}},
			{1.25, "send", "b", 0, [6]bool{no, yes, yes, yes, yes, yes}},
			{1.25, "refuse", "b", 0, [6]bool{yes, yes, yes, yes, yes, yes}},
			{2.25, "send", "c", 0, [6]bool{no, yes, yes, yes, yes, yes}},
			{2.25, "refuse", "c", 0, [6]bool{yes, yes, yes, yes, yes, yes}},
			{4.2, "", "", 0, [6]bool{yes, yes, yes, yes, yes, yes}},
			{4.25, "", "", 0, [6]bool{no, yes, yes, yes, yes, yes}},
		},
		"a poll shows room": {
			{0.5, "poll", "", 3, [6]bool{}},
			{1, "refuse", "a", 1, [6]bool{no, yes, yes, yes, yes, yes}},
			{0.9, "poll", "", 0, [6]bool{no, yes, yes, yes, yes, yes}}, // it was sent before the refusal
			{1.1, "poll", "", 3, [6]bool{no, yes, yes, yes, yes, yes}},
			{1.2, "poll", "", 1, [6]bool{no, no, no, yes, yes, yes}},
			{1.2, "poll", "", 4, [6]bool{no, no, no, yes, yes, yes}},
		},
		"forgotten": {
			{1, "refuse", "a", 0, [6]bool{yes, yes, yes, yes, yes, yes}},
			{1, "forget", "", 0, [6]bool{}},
		},
		"long ago": {
			{1, "refuse", "a", 1, [6]bool{no, yes, yes, yes, yes, yes}},
			{1 + fullMemory.Seconds(), "send", "b", 1, [6]bool{}},
			{1 + fullMemory.Seconds(), "refuse", "b", 2, [6]bool{no, no, yes, yes, yes, yes}},
			{1.25 + fullMemory.Seconds(), "", "", 0, [6]bool{}},
		},
	} {
		r, attempts, external := NewRecord(start), map[string]*Attempt{}, 0.0
		for i, s := range steps {
			now := at(s.at)
			if attempts[s.which] == nil {
				attempts[s.which] = &Attempt{SentAt: now, Streams: true}
			}
			a, end := attempts[s.which], End{InFlight: s.others, External: external}
			switch s.act {
			case "send":
				r.RecordReserved(a, s.others+1, now)
				r.RecordSent(a, s.others == 0, now)
			case "output":
				r.RecordFirstOutput(a, 0, now)
			case "refuse":
				end.QueueFull, end.Failed = true, true
				r.RecordEnd(a, end, &BreakerSettings{}, now)
			case "end":
				end.Processed = true
				r.RecordEnd(a, end, &BreakerSettings{}, now)
			case "disconnect":
				r.RecordEnd(a, end, &BreakerSettings{}, now)
			case "poll":
				external = float64(s.others)
				r.RecordExternal(&backends.Load{QueuesKnown: true, PolledAt: now}, external)
			case "forget":
				r.ForgetQueueFull()
			}
			for inFlight, want := range s.full {
				if got := r.IsQueueFull(int64(inFlight), now); got != want {
					t.Errorf("%s: after step %d, with %d requests in flight: full is %v, want %v", name, i, inFlight, got, want)
				}
			}
		}
	}
}

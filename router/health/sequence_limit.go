package health

import "warmroute/backends"

const (
	// minAgreeingPolls is how many polls in a row have to agree on the sequence limit of a replica.
	minAgreeingPolls = 5
	// A poll agrees if about as many sequences run as in the ones before: some may just have ended.
	maxEndedShare = 1. / 16
)

// sequenceLimit is how many sequences a replica runs at a time (vLLM's --max-num-seqs), which it does not report. It shows where
// requests wait although its KV cache has room: as many run in each poll, while some end and others start.
type sequenceLimit struct {
	known   int // 0: unknown
	running int // the most in the polls that agree
	polls   int // in a row that agree
}

// recordPoll records a poll. started: prompts were computed since the poll before.
func (s *sequenceLimit) recordPoll(l *backends.Load, started bool) {
	if !l.QueuesKnown || !l.KVKnown || l.Asleep {
		return
	}
	if l.Running > s.known {
		s.known = 0 // it was not the limit, or is not any more
	}
	ended := max(1, int(float64(s.running)*maxEndedShare))
	switch {
	case l.WaitingForCapacity == 0 || l.KVCacheUsage >= backends.MinWaitingKVUsage || l.Running == 0:
		s.running, s.polls = 0, 0
	case l.Running < s.running-ended || l.Running > s.running+ended:
		s.running, s.polls = l.Running, 1
	case started:
		s.running, s.polls = max(s.running, l.Running), s.polls+1
	}
	if s.polls >= minAgreeingPolls {
		s.known = s.running
	}
}

// SequenceLimit returns how many sequences the replica runs at a time, as far as that is known; 0: unknown.
func (r *Record) SequenceLimit() int { return r.sequences.known }

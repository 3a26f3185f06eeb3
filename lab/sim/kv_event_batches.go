package sim

import (
	"context"
	"encoding/binary"
	"fmt"
	"strings"
	"sync"

	"warmroute/kvevents/zmtp"
)

const (
	// maxBatches is how many batches can be replayed. A subscriber that lags further behind
	// loses batches.
	maxBatches = 10_000
	// maxTopics is the number of topics that one connection may subscribe to.
	maxTopics = 100
)

// subscription is the state of a connection to the PUB socket.
type subscription struct {
	batches *batchLog
	topic   string
	changed chan struct{} // has an element when the connection was subscribed

	mu       sync.Mutex
	prefixes map[string]int // how often the peer has subscribed to them
	matches  int            // how many of these subscriptions are to topic
	seq      uint64         // the next batch to send, if matches is above 0
}

// apply applies a message by which the peer subscribes or cancels that; it ignores others.
func (s *subscription) apply(message [][]byte) error {
	if len(message) != 1 || len(message[0]) == 0 {
		return nil
	}
	prefix := string(message[0][1:])
	s.mu.Lock()
	defer s.mu.Unlock()
	switch message[0][0] {
	case zmtp.Subscribe:
		if len(s.prefixes) == maxTopics && s.prefixes[prefix] == 0 {
			return fmt.Errorf("a subscriber may have at most %d topics", maxTopics)
		}
		s.prefixes[prefix]++
		if !strings.HasPrefix(s.topic, prefix) {
			return nil
		}
		if s.matches++; s.matches == 1 {
			s.seq = s.batches.nextSeq()
			select {
			case s.changed <- struct{}{}:
			default:
			}
		}
	case zmtp.Cancel:
		if s.prefixes[prefix] == 0 {
			return nil
		}
		if s.prefixes[prefix]--; s.prefixes[prefix] == 0 {
			delete(s.prefixes, prefix)
		}
		if strings.HasPrefix(s.topic, prefix) {
			s.matches--
		}
	}
	return nil
}

// isSubscribed reports whether the peer gets what is published.
func (s *subscription) isSubscribed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.matches > 0
}

// takeBatch returns the next batch to send, if there is one.
func (s *subscription) takeBatch() (b batch, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.matches == 0 {
		return batch{}, false
	}
	if b, ok = s.batches.batchFrom(s.seq); ok {
		s.seq = b.seq + 1
	}
	return b, ok
}

// sendBatches sends batches until a write fails or ctx is done.
func (s *subscription) sendBatches(ctx context.Context, c *zmtp.Conn) {
	for {
		added := s.batches.nextAdd()
		for b, ok := s.takeBatch(); ok; b, ok = s.takeBatch() {
			if b.lost {
				continue
			}
			if c.WriteMessage([]byte(s.topic), binary.BigEndian.AppendUint64(nil, b.seq), b.payload) != nil {
				return
			}
		}
		select {
		case <-added:
		case <-s.changed:
		case <-ctx.Done():
			return
		}
	}
}

// batch is an encoded batch of events.
type batch struct {
	seq     uint64
	payload []byte
	lost    bool // subscribers do not get it; see EventsLost
}

// batchLog holds the last maxBatches batches of a process.
type batchLog struct {
	mu    sync.Mutex
	ring  []batch // batch seq is at seq % maxBatches
	count uint64  // batches so far
	added chan struct{}
}

func newBatchLog() *batchLog { return &batchLog{added: make(chan struct{})} }

// add adds a batch, in place of the oldest one if there are maxBatches. If loseEvery is n above 0,
// subscribers do not get the n-th batch, the 2n-th and so on.
func (l *batchLog) add(payload []byte, loseEvery int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := batch{seq: l.count, payload: payload, lost: loseEvery > 0 && (l.count+1)%uint64(loseEvery) == 0}
	if len(l.ring) < maxBatches {
		l.ring = append(l.ring, b)
	} else {
		l.ring[l.count%maxBatches] = b
	}
	l.count++
	close(l.added)
	l.added = make(chan struct{})
}

// nextSeq returns the sequence number of the next batch.
func (l *batchLog) nextSeq() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.count
}

// batchFrom returns batch seq, or the oldest one if that is newer; false if there is none yet.
func (l *batchLog) batchFrom(seq uint64) (b batch, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if seq >= l.count {
		return batch{}, false
	}
	if l.count > maxBatches {
		seq = max(seq, l.count-maxBatches)
	}
	return l.ring[seq%maxBatches], true
}

// nextAdd returns a channel that is closed by the next call of add.
func (l *batchLog) nextAdd() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.added
}

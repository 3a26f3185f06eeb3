package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/zeebo/xxh3"
)

// publisherID names one lifetime of a publisher. It is zero for publishers that send none, as vLLM up to 0.33.
type publisherID [16]byte

// message is one batch as it was received.
type message struct {
	sequence  uint64 // 0 for the first of a publisher, then one more each
	publisher publisherID
	payload   []byte
}

// replayEnd is the sequence of the message that ends a replay.
var replayEnd = binary.BigEndian.AppendUint64(nil, math.MaxUint64)

// parseLive reads a message of live events: topic, sequence, payload.
func parseLive(frames [][]byte) (message, error) {
	if len(frames) != 3 {
		return message{}, fmt.Errorf("a message of %d frames instead of topic, sequence and payload", len(frames))
	}
	return newMessage(frames[1], frames[2])
}

// parseReplay reads a message of the replay endpoint: an empty frame, the topic (from vLLM
// 0.32), sequence and payload. end means that no more follow.
func parseReplay(frames [][]byte) (m message, end bool, err error) {
	if len(frames) != 3 && len(frames) != 4 || len(frames[0]) != 0 {
		return message{}, false, fmt.Errorf("a replay of %d frames instead of a delimiter, topic, sequence and payload", len(frames))
	}
	sequence, payload := frames[len(frames)-2], frames[len(frames)-1]
	if bytes.HasPrefix(sequence, replayEnd) {
		return message{}, true, nil
	}
	m, err = newMessage(sequence, payload)
	return m, false, err
}

// newMessage reads a sequence frame: eight bytes, and perhaps the publisher's id.
func newMessage(sequence, payload []byte) (message, error) {
	if len(sequence) < 8 {
		return message{}, fmt.Errorf("a sequence number of %d bytes instead of 8", len(sequence))
	}
	m := message{sequence: binary.BigEndian.Uint64(sequence), payload: payload}
	copy(m.publisher[:], sequence[8:])
	if m.sequence >= math.MaxInt64 {
		return message{}, errors.New("a negative sequence number")
	}
	return m, nil
}

// position is a place in what a publisher has published. The zero position is unknown.
type position struct {
	known bool
	next  uint64 // sequence of the next message

	// Of the message before next, if one was received: to tell whether a publisher that has
	// its sequence number is the same.
	received  bool
	publisher publisherID
	hash      uint64 // of its payload, in which the time is unique
}

// after returns the position behind m.
func after(m message) position {
	return position{known: true, next: m.sequence + 1, received: true, publisher: m.publisher, hash: xxh3.Hash(m.payload)}
}

// samePublisher reports whether m can be of the publisher that the position is of.
func (p position) samePublisher(m message) bool {
	return !p.received || p.publisher == m.publisher
}

// isNext reports whether m follows without gap.
func (p position) isNext(m message) bool {
	return p.known && p.samePublisher(m) && m.sequence == p.next
}

// isPast reports whether m was received before, given that the publisher is the same.
func (p position) isPast(m message) bool {
	return p.known && p.samePublisher(m) && m.sequence < p.next
}

// isLast reports whether m is the very message before the position.
func (p position) isLast(m message) bool {
	return p.received && after(m) == p
}

package recorder

import (
	"encoding/binary"
	"errors"
	"strconv"
)

// entry is what is recorded of a request.
type entry struct {
	timestamp, ttft, duration           uint64 // microseconds; a ttft of 0: none
	inputLength, inputBytes, extraBytes uint64
	outputLength, cachedTokens          uint64
	code, model                         uint64
	conversation                        uint64 // 0: none
	flags                               uint64
	runs                                []uint64 // the first number of each run of blocks, and how many they are
}

// The bits of entry.flags.
const (
	isStream = 1 << iota
	isCounted
	hasCached
	hasModel
)

// fields returns the fields but runs, in the order in which they are in memory.
func (e *entry) fields() [12]*uint64 {
	return [...]*uint64{
		&e.timestamp, &e.ttft, &e.duration, &e.inputLength, &e.inputBytes, &e.extraBytes, &e.outputLength, &e.cachedTokens, &e.code, &e.model,
		&e.conversation, &e.flags,
	}
}

// addRun adds consecutive blocks, of which the first has the number.
func (e *entry) addRun(first, count uint64) {
	if n := len(e.runs); n > 0 && e.runs[n-2]+e.runs[n-1] == first {
		e.runs[n-1] += count
		return
	}
	e.runs = append(e.runs, first, count)
}

// appendBinary appends the entry as it is kept in memory.
func (e *entry) appendBinary(b []byte) []byte {
	for _, field := range e.fields() {
		b = binary.AppendUvarint(b, *field)
	}
	b = binary.AppendUvarint(b, uint64(len(e.runs)))
	for _, n := range e.runs {
		b = binary.AppendUvarint(b, n)
	}
	return b
}

var errDamaged = errors.New("the recording in memory is damaged")

// parseBinary sets the entry to the one that b begins with, and returns the rest of b.
func (e *entry) parseBinary(b []byte) (rest []byte, err error) {
	next := func() (value uint64) {
		value, n := binary.Uvarint(b)
		if n <= 0 {
			b, err = nil, errDamaged
			return 0
		}
		b = b[n:]
		return value
	}
	for _, field := range e.fields() {
		*field = next()
	}
	e.runs = e.runs[:0]
	for n := next(); n > 0 && err == nil; n-- {
		e.runs = append(e.runs, next())
	}
	return b, err
}

// appendLine appends the entry as a line of a recording.
func (e *entry) appendLine(b []byte) []byte {
	number := func(key string, n uint64) { b = strconv.AppendUint(append(b, key...), n, 10) }
	millis := func(key string, n uint64) { b = appendMillis(append(b, key...), n) }
	millis(`{"timestamp":`, e.timestamp)
	number(`,"input_length":`, e.inputLength)
	number(`,"input_bytes":`, e.inputBytes)
	if e.extraBytes > 0 {
		number(`,"extra_bytes":`, e.extraBytes)
	}
	if e.flags&isCounted != 0 {
		b = append(b, `,"counted":true`...)
	}
	number(`,"output_length":`, e.outputLength)
	if e.flags&hasCached != 0 {
		number(`,"cached_tokens":`, e.cachedTokens)
	}
	number(`,"code":`, e.code)
	b = strconv.AppendBool(append(b, `,"stream":`...), e.flags&isStream != 0)
	if e.flags&hasModel != 0 {
		number(`,"model":`, e.model)
	}
	if e.conversation != 0 {
		number(`,"session":`, e.conversation)
	}
	if e.ttft > 0 {
		millis(`,"ttft_ms":`, e.ttft)
	}
	millis(`,"duration_ms":`, e.duration)
	separator := `,"block_runs":[`
	for _, n := range e.runs {
		number(separator, n)
		separator = ","
	}
	if len(e.runs) == 0 {
		b = append(b, separator...)
	}
	return append(b, "]}\n"...)
}

// appendMillis appends milliseconds with microseconds, so that the requests of a burst
// have different timestamps.
func appendMillis(b []byte, microseconds uint64) []byte {
	return strconv.AppendFloat(b, float64(microseconds)/1000, 'f', -1, 64)
}

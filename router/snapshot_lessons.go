package router

import (
	"encoding/binary"
	"math"
)

// lessonNumbers is how many numbers of what was learned of a backend go into a
// snapshot.
const lessonNumbers = 2*reachBuckets + 6

// append writes what takes long to learn and outlives a restart of the proxy:
// how far back the cache goes, the text's tokens, the answers' length and the
// speed. A change of what is written is another snapshotVersion.
func (l *lessons) append(to []byte) []byte {
	numbers := make([]float64, 0, lessonNumbers)
	numbers = append(numbers, l.reach.there[:]...)
	numbers = append(numbers, l.reach.gone[:]...)
	numbers = append(numbers, float64(l.reach.edge), l.texts.bytes, l.texts.tokens,
		l.answer.value, l.answer.seen, l.speed.learned)
	for _, x := range numbers {
		to = binary.LittleEndian.AppendUint64(to, math.Float64bits(x))
	}
	return to
}

// recall takes over what append wrote, and reports whether it made sense.
func (l *lessons) recall(from []byte) bool {
	var numbers [lessonNumbers]float64
	for i := range numbers {
		numbers[i] = math.Float64frombits(binary.LittleEndian.Uint64(from[8*i:]))
		if !(numbers[i] >= 0 && numbers[i] <= 1e15) {
			return false
		}
	}
	rest := numbers[2*reachBuckets:]
	edge, texts, answer, speed := rest[0], ratio{rest[1], rest[2]}, average{rest[3], rest[4]}, rest[5]
	switch {
	case edge >= reachBuckets,
		texts.tokens == 0 || texts.value() < leastBytesPerToken || texts.value() > mostBytesPerToken,
		answer.value < 1 || answer.value > mostAnswer,
		speed != 0 && (speed < leastRate || speed > mostRate):
		return false
	}
	copy(l.reach.there[:], numbers[:])
	copy(l.reach.gone[:], numbers[reachBuckets:])
	l.reach.edge = int(edge)
	l.texts, l.answer, l.speed.learned = texts, answer, speed
	return true
}

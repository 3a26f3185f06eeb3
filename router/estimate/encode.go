package estimate

import (
	"encoding/binary"
	"math"
)

// encodedNumbers is how many numbers AppendBackend writes.
const encodedNumbers = 2*bucketCount + 5 + int(stepTerms)

// EncodedBytes is the length of what AppendBackend writes.
const EncodedBytes = 8 * encodedNumbers

// AppendBackend appends the estimates of a backend that take long to learn: the capacity,
// the token ratio, the outputs' length and the times of steps. A change of what is
// written needs another version of the snapshot format.
func (f *Estimates) AppendBackend(to []byte, slot int) []byte {
	b := &f.backends[slot]
	numbers := make([]float64, 0, encodedNumbers)
	numbers = append(numbers, b.capacity.present[:]...)
	numbers = append(numbers, b.capacity.absent[:]...)
	numbers = append(numbers, float64(b.capacity.lastKept), b.ratio.bytes, b.ratio.tokens,
		b.output.Value, b.output.count)
	if times := f.regressionOf(slot); times.samples > 0 {
		numbers = append(numbers, times.learned[:]...)
	}
	numbers = numbers[:encodedNumbers] // 0: not learned
	for _, x := range numbers {
		to = binary.LittleEndian.AppendUint64(to, math.Float64bits(x))
	}
	return to
}

// RestoreBackend reads what AppendBackend wrote, EncodedBytes bytes, and reports whether
// it is plausible. If it is not, nothing changes.
func (f *Estimates) RestoreBackend(slot int, from []byte) (ok bool) {
	var numbers [encodedNumbers]float64
	for i := range numbers {
		numbers[i] = math.Float64frombits(binary.LittleEndian.Uint64(from[8*i:]))
		if !(numbers[i] >= 0 && numbers[i] <= 1e15) {
			return false
		}
	}
	rest := numbers[2*bucketCount:]
	lastKept, ratio, output, times := rest[0], tokenRatio{rest[1], rest[2]}, Average{rest[3], rest[4]}, coefficients(rest[5:])
	switch {
	case lastKept >= bucketCount,
		ratio.tokens == 0 || ratio.bytesPerToken() < minBytesPerToken || ratio.bytesPerToken() > maxBytesPerToken,
		output.Value < 1 || output.Value > MaxOutputTokens,
		times != coefficients{} && !times.isPlausible():
		return false
	}
	b := &f.backends[slot]
	copy(b.capacity.present[:], numbers[:])
	copy(b.capacity.absent[:], numbers[bucketCount:])
	b.capacity.lastKept = int(lastKept)
	b.ratio, b.output = ratio, output
	if times[termTokens] > 0 {
		f.restoreSteps(slot, times)
	}
	return true
}

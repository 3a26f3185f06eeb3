package replay

import "time"

// joinedWithin is the time in which a backend that joined should be of use.
const joinedWithin = 2 * time.Minute

// joinedShare is the prefill work that backends did within two minutes of
// joining, over the fleet's mean in that time; the mean of all that joined after
// the start, 0 where none did.
func (t *Timeline) joinedShare(changes []Change) float64 {
	sum, n := 0.0, 0
	for _, c := range changes {
		if c.What == Join && c.At > 0 {
			work := t.between(t.Work, c.At, c.At+joinedWithin)
			sum += work[c.Backend] / max(1, total(work)/float64(len(work)))
			n++
		}
	}
	return sum / float64(max(1, n))
}

// between sums up each backend's values over the stretches that begin in [from, to).
func (t *Timeline) between(values [][]float64, from, to time.Duration) []float64 {
	sums := make([]float64, len(values))
	first, end := int(from/t.Bucket), int(to/t.Bucket)
	for i, v := range values {
		sums[i] = total(v[min(first, len(v)):min(end, len(v))])
	}
	return sums
}

func total(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum
}

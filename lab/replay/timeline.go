package replay

import (
	"time"
)

const (
	timelineBucket = time.Second
	maxBuckets     = 8192 // then they are merged in pairs
)

// Timeline holds what each backend did in each bucket of a run.
type Timeline struct {
	Bucket   time.Duration // length of a bucket
	Work     [][]float64   // prompt tokens prefilled, by backend and bucket
	InFlight [][]float64   // mean of our requests in flight, by backend and bucket

	count []int // in flight now, by backend
	since []time.Duration
}

func newTimeline(backends int) *Timeline {
	return &Timeline{
		Bucket: timelineBucket, Work: make([][]float64, backends), InFlight: make([][]float64, backends),
		count: make([]int, backends), since: make([]time.Duration, backends),
	}
}

// addWork adds tokens that a backend prefilled until now.
func (t *Timeline) addWork(backend int, now time.Duration, tokens int) {
	if tokens > 0 {
		b := t.ensureBucket(now)
		t.Work[backend][b] += float64(tokens)
	}
}

// addInFlight adds to the number of a backend's requests in flight from now on.
func (t *Timeline) addInFlight(backend int, now time.Duration, delta int) {
	last := t.ensureBucket(now)
	if n := t.count[backend]; n > 0 {
		for from := t.since[backend]; from < now; {
			b := int(from / t.Bucket)
			to := min(now, time.Duration(b+1)*t.Bucket)
			t.InFlight[backend][min(b, last)] += float64(n) * float64(to-from) / float64(t.Bucket)
			from = to
		}
	}
	t.count[backend] += delta
	t.since[backend] = now
}

// ensureBucket returns the index of the bucket of now, making room for it.
func (t *Timeline) ensureBucket(now time.Duration) int {
	for now/t.Bucket >= maxBuckets {
		t.Bucket *= 2
		for i := range t.Work {
			t.Work[i] = mergePairsInPlace(t.Work[i], 1)
			t.InFlight[i] = mergePairsInPlace(t.InFlight[i], 0.5)
		}
	}
	b := int(now / t.Bucket)
	for i := range t.Work {
		for len(t.Work[i]) <= b {
			t.Work[i] = append(t.Work[i], 0)
			t.InFlight[i] = append(t.InFlight[i], 0)
		}
	}
	return b
}

// mergePairsInPlace replaces each pair of values by its sum times scale. It returns
// the shortened slice.
func mergePairsInPlace(values []float64, scale float64) []float64 {
	for i := 0; i < len(values); i += 2 {
		sum := values[i]
		if i+1 < len(values) {
			sum += values[i+1]
		}
		values[i/2] = sum * scale
	}
	return values[:(len(values)+1)/2]
}

// sumMiddle returns the sum of each backend's values over the middle 80 % of a run.
func (t *Timeline) sumMiddle(byBackend [][]float64, runLength time.Duration) []float64 {
	sums := make([]float64, len(byBackend))
	from, to := int(runLength/10/t.Bucket), int((runLength-runLength/10)/t.Bucket)
	for i, v := range byBackend {
		for _, x := range v[min(from, len(v)):min(to+1, len(v))] {
			sums[i] += x
		}
	}
	return sums
}

// joinInterval is the time after joining in which a backend should get load.
const joinInterval = 2 * time.Minute

// joinedWorkOverMean returns the prefill work that backends did within joinInterval of
// joining, over the fleet's mean in that time: the mean of all that joined after
// the start, 0 if none did.
func (t *Timeline) joinedWorkOverMean(changes []Change) float64 {
	shares, n := 0.0, 0
	for _, c := range changes {
		if c.Kind == Join && c.At > 0 {
			work := t.sumBetween(t.Work, c.At, c.At+joinInterval)
			shares += work[c.Backend] / max(1, sum(work)/float64(len(work)))
			n++
		}
	}
	return shares / float64(max(1, n))
}

// sumBetween returns the sum of each backend's values over buckets that begin in
// [from, to).
func (t *Timeline) sumBetween(byBackend [][]float64, from, to time.Duration) []float64 {
	sums := make([]float64, len(byBackend))
	first, end := int(from/t.Bucket), int(to/t.Bucket)
	for i, v := range byBackend {
		sums[i] = sum(v[min(first, len(v)):min(end, len(v))])
	}
	return sums
}

func sum(values []float64) float64 {
	total := 0.0
	for _, v := range values {
		total += v
	}
	return total
}

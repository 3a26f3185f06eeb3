package replay

import "time"

const (
	timelineBucket  = time.Second
	timelineBuckets = 8192 // at most; then they are joined in pairs
)

// Timeline is what each backend did in each stretch of a run.
type Timeline struct {
	Bucket   time.Duration // the length of a stretch
	Work     [][]float64   // prompt tokens prefilled, by backend and stretch
	InFlight [][]float64   // requests of ours in flight, mean of the stretch

	count []int // in flight now, by backend
	since []time.Duration
}

func newTimeline(backends int) *Timeline {
	return &Timeline{
		Bucket: timelineBucket, Work: make([][]float64, backends), InFlight: make([][]float64, backends),
		count: make([]int, backends), since: make([]time.Duration, backends),
	}
}

// worked adds tokens that a backend has prefilled by now.
func (t *Timeline) worked(backend int, now time.Duration, tokens int) {
	if tokens > 0 {
		b := t.bucket(now)
		t.Work[backend][b] += float64(tokens)
	}
}

// inFlight notes that a backend has so many more, or fewer, in flight from now on.
func (t *Timeline) inFlight(backend int, now time.Duration, more int) {
	last := t.bucket(now)
	if n := t.count[backend]; n > 0 {
		for from := t.since[backend]; from < now; {
			b := int(from / t.Bucket)
			to := min(now, time.Duration(b+1)*t.Bucket)
			t.InFlight[backend][min(b, last)] += float64(n) * float64(to-from) / float64(t.Bucket)
			from = to
		}
	}
	t.count[backend] += more
	t.since[backend] = now
}

// bucket makes room up to the one that now is in.
func (t *Timeline) bucket(now time.Duration) int {
	for now/t.Bucket >= timelineBuckets {
		t.Bucket *= 2
		for i := range t.Work {
			t.Work[i] = joinPairs(t.Work[i], 1)
			t.InFlight[i] = joinPairs(t.InFlight[i], 0.5)
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

func joinPairs(values []float64, scale float64) []float64 {
	for i := 0; i < len(values); i += 2 {
		sum := values[i]
		if i+1 < len(values) {
			sum += values[i+1]
		}
		values[i/2] = sum * scale
	}
	return values[:(len(values)+1)/2]
}

// middle sums up each backend's values over the middle 80 % of a run.
func (t *Timeline) middle(values [][]float64, length time.Duration) []float64 {
	sums := make([]float64, len(values))
	from, to := int(length/10/t.Bucket), int((length-length/10)/t.Bucket)
	for i, v := range values {
		for _, x := range v[min(from, len(v)):min(to+1, len(v))] {
			sums[i] += x
		}
	}
	return sums
}

package queue

import (
	"math"
	"time"
)

const (
	departureSeconds     = 10              // for which departures are remembered
	minDepartureInterval = 2 * time.Second // below which they show no rate

	// MaxRetryDelay is the maximum Retry-After of a refused request.
	MaxRetryDelay = time.Minute
)

// departures counts the requests that left the queue, in whatever way, since it was
// empty last, for up to departureSeconds.
type departures struct {
	since   time.Time // the queue was empty last
	last    time.Time // zero: none since
	seconds [departureSeconds]struct {
		second int64 // of Unix time
		count  int
	}
}

// restart forgets all departures: the queue was empty until now.
func (d *departures) restart(now time.Time) { *d = departures{since: now} }

func (d *departures) addDeparture(now time.Time) {
	s := &d.seconds[now.Unix()%departureSeconds]
	if s.second != now.Unix() {
		s.second, s.count = now.Unix(), 0
	}
	s.count++
	d.last = now
}

// estimateWait returns how long n departures take at the recent rate, in whole seconds,
// or 0 if unknown, and the time since the last departure.
func (d *departures) estimateWait(n int, now time.Time) (wait, sinceLast time.Duration) {
	interval := min(now.Sub(d.since), departureSeconds*time.Second)
	count := 0
	for _, s := range d.seconds {
		if age := now.Unix() - s.second; age >= 0 && age < departureSeconds {
			count += s.count
		}
	}
	sinceLast = now.Sub(d.since)
	if !d.last.IsZero() {
		sinceLast = now.Sub(d.last)
	}
	if count == 0 || interval < minDepartureInterval {
		return 0, sinceLast
	}
	seconds := min(float64(n)*interval.Seconds()/float64(count), MaxRetryDelay.Seconds())
	return time.Duration(math.Ceil(seconds)) * time.Second, sinceLast
}

package router

import (
	"math"
	"time"
)

const (
	departureSeconds     = 10              // for which departures are remembered
	minDepartureInterval = 2 * time.Second // below which they show no rate
)

// departures counts the requests that left the admission queue, whichever way, since it
// was empty last, for up to departureSeconds. Guarded by Router.deciding.
type departures struct {
	since   time.Time // the queue was empty last
	last    time.Time // the last departure; zero: none since
	seconds [departureSeconds]struct {
		second int64 // of Unix time
		count  int
	}
}

// restart forgets what was before: the queue was empty until now.
func (d *departures) restart(now time.Time) { *d = departures{since: now} }

func (d *departures) add(now time.Time) {
	s := &d.seconds[now.Unix()%departureSeconds]
	if s.second != now.Unix() {
		s.second, s.count = now.Unix(), 0
	}
	s.count++
	d.last = now
}

// timeFor returns how long the queue takes to lose n requests at the rate at which
// it lost some, in whole seconds, or 0 when that is not known. silence is since
// when it has lost none.
func (d *departures) timeFor(n int, now time.Time) (wait, silence time.Duration) {
	interval := min(now.Sub(d.since), departureSeconds*time.Second)
	left := 0
	for _, s := range d.seconds {
		if age := now.Unix() - s.second; age >= 0 && age < departureSeconds {
			left += s.count
		}
	}
	silence = now.Sub(d.since)
	if !d.last.IsZero() {
		silence = now.Sub(d.last)
	}
	if left == 0 || interval < minDepartureInterval {
		return 0, silence
	}
	seconds := min(float64(n)*interval.Seconds()/float64(left), longestRetry.Seconds())
	return time.Duration(math.Ceil(seconds)) * time.Second, silence
}

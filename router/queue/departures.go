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
	seconds [departureSeconds]departuresOfSecond
	rate    float64 // at which the tokens of requests that were sent have left it, as last known; 0: never
}

type departuresOfSecond struct {
	second int64 // of Unix time
	count  int
	tokens float64 // of requests that were sent
}

// restart forgets all departures but the rate: the queue was empty until now.
func (d *departures) restart(now time.Time) { *d = departures{since: now, rate: d.rate} }

func (d *departures) addDeparture(now time.Time) {
	d.at(now).count++
	d.last = now
}

// addTokens adds the tokens of a request that is sent.
func (d *departures) addTokens(tokens float64, now time.Time) { d.at(now).tokens += tokens }

func (d *departures) at(now time.Time) *departuresOfSecond {
	s := &d.seconds[now.Unix()%departureSeconds]
	if s.second != now.Unix() {
		*s = departuresOfSecond{second: now.Unix()}
	}
	return s
}

// tokensPerSecond returns the rate at which the tokens of requests that were sent left the queue of late, or when it was last
// known, 0 if it never was. The seconds before the first of them, such as those of an outage, do not count.
func (d *departures) tokensPerSecond(now time.Time) float64 {
	first, tokens := now, 0.0
	for _, s := range d.seconds {
		if age := now.Unix() - s.second; age >= 0 && age < departureSeconds && s.tokens > 0 {
			tokens += s.tokens
			if begin := time.Unix(s.second, 0); begin.Before(first) {
				first = begin
			}
		}
	}
	if first.Before(d.since) {
		first = d.since
	}
	if interval := now.Sub(first); interval >= minDepartureInterval {
		d.rate = tokens / interval.Seconds()
	}
	return d.rate
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

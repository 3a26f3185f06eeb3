package proxy

import "time"

// Settings are what may change while a Proxy runs. Those of its arrival hold for
// a request to its end. Never modified once a Proxy has them.
type Settings struct {
	Attempts       int           // at most, for one request; a failed connect is none
	InFlight       int           // requests at once, held ones included
	Connections    int           // of clients, where others can be closed
	QueryBytes     int           // of a request's URL
	BodyBytes      int64         // of one request
	BodyBytesTotal int64         // of all requests held at once
	BodyIdle       time.Duration // for a request's body to stand still; 0: no limit
	HoldTime       time.Duration // for a request to wait for a backend, as the router has it; 0: none waits
	FirstByte      time.Duration // for a stream to produce its first event; 0: no limit
	Response       time.Duration // for a replica to make no progress while a request that does not stream waits for it; 0: no limit
	RetryShare     float64       // of the requests of 10 s, that may be tried again
	RetryPerSecond int           // that always may
	RetryStalled   bool          // what waits for a replica that does nothing is tried elsewhere
	RetryTimeouts  bool          // as is what has waited for FirstByte or Response
	Idle           time.Duration // for a stream to be silent after that; 0: no limit
	Keepalive      time.Duration // between comments on a stream that is silent; 0: none
	WriteIdle      time.Duration // for a client to take nothing of its answer; 0: no limit
	SessionHeader  string        // names the session that a request belongs to; empty: none does
	RouteHeaders   bool          // tell the client where its request went, and why, if its key allows it
	IsolateTenants bool          // no prompt matches what another tenant sent
}

// Configure gives the requests that arrive from now on other settings.
func (p *Proxy) Configure(s Settings) { p.settings.Store(&s) }

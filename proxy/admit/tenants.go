// Package admit decides whether a request may come in: whose it is, how much of the memory for bodies and of the places for
// requests its tenant has, and how its body is read.
package admit

import (
	"errors"
	"net/netip"
	"sync"
	"time"
)

var (
	ErrBodyMemory  = errors.New("all bodies together exceed the limit")
	ErrBodyShare   = errors.New("the bodies of one tenant exceed its share")
	ErrUploadShare = errors.New("the requests of one tenant whose bodies are incomplete exceed its share")
)

// Tenant is whom a request is charged to.
type Tenant struct {
	Key     string       // name of the API key
	Network netip.Prefix // of the client, where there are no keys
}

// Kind returns what a tenant is, for messages.
func (t Tenant) Kind() string {
	if t.Key != "" {
		return "API key"
	}
	return "client address"
}

// refusalWindow is for how long a tenant that was refused counts as one that sends requests.
const refusalWindow = time.Minute

// Tenants counts what the requests of each tenant use, and divides what all of them may use: once half of it is in use, each
// tenant has a share. While nobody else sends requests, a tenant has all of it. Safe for concurrent use. The zero value is ready.
type Tenants struct {
	mu        sync.Mutex            // guards what follows
	use       map[Tenant]*tenantUse // of tenants that use something
	bodyBytes int64                 // of all tenants
	refused   [2]tenantRefusal      // the last one, and the last one of another tenant
}

// tenantUse is what the requests of one tenant use.
type tenantUse struct {
	requests  int   // in flight
	uploads   int   // of them, those whose body is incomplete
	bodyBytes int64 // of the buffers of their bodies
}

// tenantRefusal is a request that was refused since others use too much.
type tenantRefusal struct {
	tenant Tenant
	at     time.Time // zero: there was none
}

// BodyLimits bound one body and the buffers of all, in bytes.
type BodyLimits struct{ Each, Total int64 }

// share returns how much of the total a tenant may use once half of it is in use and others send requests: a quarter, or
// one body.
func (l BodyLimits) share() int64 { return max(l.Total/4, l.Each) }

// BeginUpload counts a request in flight whose body is incomplete, until EndUpload and EndRequest. inFlight is the number of
// all requests, this one included. It fails, and counts nothing, beyond the tenant's share of the limit.
func (t *Tenants) BeginUpload(of Tenant, inFlight, limit int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if 2*inFlight > limit {
		if u := t.use[of]; u != nil && int64(u.uploads) >= max(limit/4, 1) && t.othersActiveLocked(of) {
			t.recordRefusalLocked(of)
			return ErrUploadShare
		}
	}
	t.addLocked(of, tenantUse{requests: 1, uploads: 1})
	return nil
}

// EndUpload counts the body of a request as complete, or given up.
func (t *Tenants) EndUpload(of Tenant) { t.add(of, tenantUse{uploads: -1}) }

// EndRequest ends a request that BeginUpload has counted.
func (t *Tenants) EndRequest(of Tenant) { t.add(of, tenantUse{requests: -1}) }

// reserveBodyBytes charges n bytes to a tenant, until releaseBodyBytes. It fails, and charges nothing, beyond the total or the
// tenant's share of it.
func (t *Tenants) reserveBodyBytes(of Tenant, n int64, limits BodyLimits) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.bodyBytes + n
	if all > limits.Total {
		t.recordRefusalLocked(of)
		return ErrBodyMemory
	}
	if 2*all > limits.Total {
		own := n
		if u := t.use[of]; u != nil {
			own += u.bodyBytes
		}
		if own > limits.share() && t.othersActiveLocked(of) {
			t.recordRefusalLocked(of)
			return ErrBodyShare
		}
	}
	t.addLocked(of, tenantUse{bodyBytes: n})
	return nil
}

// releaseBodyBytes ends the reservation of n bytes.
func (t *Tenants) releaseBodyBytes(of Tenant, n int64) { t.add(of, tenantUse{bodyBytes: -n}) }

// BodyBytesInUse returns the size of the buffers of all bodies.
func (t *Tenants) BodyBytesInUse() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bodyBytes
}

// RecordRefusal records that a request of a tenant was refused since all requests together use too much.
func (t *Tenants) RecordRefusal(of Tenant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.recordRefusalLocked(of)
}

func (t *Tenants) recordRefusalLocked(of Tenant) {
	if t.refused[0].tenant != of {
		t.refused[1] = t.refused[0]
	}
	t.refused[0] = tenantRefusal{of, time.Now()}
}

// othersActiveLocked reports whether another tenant has requests in flight, or was refused of late.
func (t *Tenants) othersActiveLocked(of Tenant) bool {
	others := len(t.use)
	if _, found := t.use[of]; found {
		others--
	}
	if others > 0 {
		return true
	}
	for _, r := range t.refused {
		if r.tenant != of && !r.at.IsZero() && time.Since(r.at) < refusalWindow {
			return true
		}
	}
	return false
}

// add adds to what a tenant uses.
func (t *Tenants) add(of Tenant, more tenantUse) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.addLocked(of, more)
}

func (t *Tenants) addLocked(of Tenant, more tenantUse) {
	u := t.use[of]
	if u == nil {
		u = &tenantUse{}
		if t.use == nil {
			t.use = map[Tenant]*tenantUse{}
		}
		t.use[of] = u
	}
	u.requests += more.requests
	u.uploads += more.uploads
	u.bodyBytes += more.bodyBytes
	t.bodyBytes += more.bodyBytes
	if *u == (tenantUse{}) {
		delete(t.use, of)
	}
}

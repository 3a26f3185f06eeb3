package proxy

import (
	"errors"
	"net/netip"
	"sync"
	"time"
)

var (
	errBodyMemory  = errors.New("all bodies together exceed the limit")
	errBodyShare   = errors.New("the bodies of one tenant exceed its share")
	errUploadShare = errors.New("the requests of one tenant whose bodies are incomplete exceed its share")
)

// tenant is whom a request is charged to.
type tenant struct {
	key     string       // name of the API key
	network netip.Prefix // of the client, where there are no keys
}

// kind returns what a tenant is, for messages.
func (t tenant) kind() string {
	if t.key != "" {
		return "API key"
	}
	return "client address"
}

// refusalWindow is for how long a tenant that was refused counts as one that sends requests.
const refusalWindow = time.Minute

// tenants counts what the requests of each tenant use, and divides what all of them may use: once half of it is in use, each
// tenant has a share. While nobody else sends requests, a tenant has all of it. Safe for concurrent use. The zero value is ready.
type tenants struct {
	mu        sync.Mutex           // guards what follows
	use       map[tenant]tenantUse // of tenants that use something
	bodyBytes int64                // of all tenants
	refused   [2]tenantRefusal     // the last one, and the last one of another tenant
}

// tenantUse is what the requests of one tenant use.
type tenantUse struct {
	requests  int   // in flight
	uploads   int   // of them, those whose body is incomplete
	bodyBytes int64 // of the buffers of their bodies
}

// tenantRefusal is a request that was refused since others use too much.
type tenantRefusal struct {
	tenant tenant
	at     time.Time // zero: there was none
}

// bodyLimits bound one body and the buffers of all, in bytes.
type bodyLimits struct{ each, total int64 }

// share returns how much of the total a tenant may use once half of it is in use and others send requests: a quarter, or
// one body.
func (l bodyLimits) share() int64 { return max(l.total/4, l.each) }

// beginUpload counts a request in flight whose body is incomplete, until endUpload and endRequest. inFlight is the number of
// all requests, this one included. It fails, and counts nothing, beyond the tenant's share of the limit.
func (t *tenants) beginUpload(of tenant, inFlight, limit int64) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	u := t.use[of]
	if 2*inFlight > limit && int64(u.uploads) >= max(limit/4, 1) && t.othersActiveLocked(of) {
		t.recordRefusalLocked(of)
		return errUploadShare
	}
	u.requests++
	u.uploads++
	t.setUseLocked(of, u)
	return nil
}

// endUpload counts the body of a request as complete, or given up.
func (t *tenants) endUpload(of tenant) { t.subtract(of, tenantUse{uploads: 1}) }

// endRequest ends a request that beginUpload has counted.
func (t *tenants) endRequest(of tenant) { t.subtract(of, tenantUse{requests: 1}) }

// reserveBodyBytes charges n bytes to a tenant, until releaseBodyBytes. It fails, and charges nothing, beyond the total or the
// tenant's share of it.
func (t *tenants) reserveBodyBytes(of tenant, n int64, limits bodyLimits) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	u := t.use[of]
	all, own := t.bodyBytes+n, u.bodyBytes+n
	switch {
	case all > limits.total:
		t.recordRefusalLocked(of)
		return errBodyMemory
	case 2*all > limits.total && own > limits.share() && t.othersActiveLocked(of):
		t.recordRefusalLocked(of)
		return errBodyShare
	}
	t.bodyBytes, u.bodyBytes = all, own
	t.setUseLocked(of, u)
	return nil
}

// releaseBodyBytes ends the reservation of n bytes.
func (t *tenants) releaseBodyBytes(of tenant, n int64) { t.subtract(of, tenantUse{bodyBytes: n}) }

func (t *tenants) bodyBytesInUse() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bodyBytes
}

// recordRefusal records that a request of a tenant was refused since all requests together use too much.
func (t *tenants) recordRefusal(of tenant) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.recordRefusalLocked(of)
}

func (t *tenants) recordRefusalLocked(of tenant) {
	if t.refused[0].tenant != of {
		t.refused[1] = t.refused[0]
	}
	t.refused[0] = tenantRefusal{of, time.Now()}
}

// othersActiveLocked reports whether another tenant has requests in flight, or was refused of late.
func (t *tenants) othersActiveLocked(of tenant) bool {
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

// subtract subtracts from what a tenant uses.
func (t *tenants) subtract(of tenant, ended tenantUse) {
	t.mu.Lock()
	defer t.mu.Unlock()
	u := t.use[of]
	u.requests -= ended.requests
	u.uploads -= ended.uploads
	u.bodyBytes -= ended.bodyBytes
	t.bodyBytes -= ended.bodyBytes
	t.setUseLocked(of, u)
}

func (t *tenants) setUseLocked(of tenant, u tenantUse) {
	if u == (tenantUse{}) {
		delete(t.use, of)
		return
	}
	if t.use == nil {
		t.use = map[tenant]tenantUse{}
	}
	t.use[of] = u
}

package router

import "time"

// sharingWindow is for how long after a request of another tenant or priority than the one before backends count as shared.
const sharingWindow = time.Minute

// sharing records whether requests of several tenants or priorities were seen recently.
type sharing struct {
	tenant   uint64 // of the last request
	priority int    // likewise
	until    time.Time
}

// record records a request.
func (s *sharing) record(req *Request, now time.Time) {
	if req.Tenant == s.tenant && req.Priority == s.priority {
		return
	}
	s.tenant, s.priority = req.Tenant, req.Priority
	s.until = now.Add(sharingWindow)
}

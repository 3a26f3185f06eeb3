package router

import "time"

// sharingWindow is for how long after a request of another tenant or priority than the one before backends count as shared.
const sharingWindow = time.Minute

// tenantMix is whether requests of several tenants or priorities were seen recently.
type tenantMix struct {
	tenant   uint64 // of the last request
	priority int    // likewise
	until    time.Time
}

// observe notes a request: if it is of another tenant or priority than the one before, backends count as shared for sharingWindow.
func (m *tenantMix) observe(req *Request, now time.Time) {
	if req.Tenant == m.tenant && req.Priority == m.priority {
		return
	}
	m.tenant, m.priority = req.Tenant, req.Priority
	m.until = now.Add(sharingWindow)
}

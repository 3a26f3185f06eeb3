package admin

import (
	"net/http"
	"strings"
	"time"

	"warmroute/usage"
)

// usageReport is the response to GET /api/usage.
type usageReport struct {
	*usage.Report
	InFlight map[string]int64 `json:"in_flight"` // requests now, by key
	// SinceStart reports that there is no usage.file, so that usage before Started is not known.
	SinceStart bool      `json:"since_start"`
	Started    time.Time `json:"started"`
	Unsaved    string    `json:"unsaved,omitempty"` // why rows are in memory and not in the file
}

// serveUsage serves GET /api/usage, as CSV if the client accepts that or format=csv is given, else as JSON.
func (h *Handler) serveUsage(w http.ResponseWriter, r *http.Request) {
	values, err := parseQuery(r.URL.RawQuery, "from", "to", "by", "format")
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	q, err := usage.ParseQuery(values["from"], values["to"], values["by"])
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	format := values["format"]
	if format == "" && strings.HasPrefix(r.Header.Get("Accept"), "text/csv") {
		format = "csv"
	}
	if format != "" && format != "csv" && format != "json" {
		writeError(w, http.StatusBadRequest, "format is neither json nor csv")
		return
	}
	report, err := h.Usage.Report(q)
	if err != nil {
		writeError(w, http.StatusInternalServerError, "read usage.file: "+err.Error())
		return
	}
	if format == "csv" {
		w.Header().Set("Content-Type", "text/csv; charset=utf-8")
		_ = report.WriteCSV(w) // an error means that the client has left
		return
	}
	s := h.Usage.Status()
	out := usageReport{Report: report, InFlight: h.Proxy.CountInFlightByKey(), SinceStart: !s.HasFile, Started: s.Started.UTC()}
	if s.Err != nil {
		out.Unsaved = s.Err.Error()
	}
	writeJSON(w, http.StatusOK, out)
}

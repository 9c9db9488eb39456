"""Credentials and endpoints of S3, Google Cloud Storage and Azure for obstore, read where fsspec reads them.

Each service has a function that takes a bucket and the options that all services share, and returns obstore's store.
fsspec's configuration (``fsspec.config.conf``) comes first, then the environment, then the machine.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from spdist.shown import remember

Options = dict[str, Any]
"""Keywords of a store of obstore."""


def s3(bucket: str, common: Options) -> Any:
    """Return obstore's store of a bucket of S3.

    Keys, region and endpoint are found as boto finds them: the environment, ``~/.aws``, roles of machines.
    """
    from obstore.store import S3Store

    return S3Store(bucket, **common, **s3_options())


def s3_options() -> Options:
    """Return obstore's options for S3, from the configuration of botocore and fsspec."""
    given = _configured("s3")
    botocore: Any = importlib.import_module("botocore.session")
    session = botocore.get_session()
    client = given.get("client_kwargs", {})
    options = {"region": client.get("region_name") or session.get_config_variable("region") or "us-east-1"}
    endpoint = given.get("endpoint_url") or client.get("endpoint_url") or _s3_endpoint()
    if endpoint:
        options["endpoint"] = endpoint
    if given.get("anon"):
        return options | {"skip_signature": True}
    if given.get("key"):
        keys = {"access_key_id": given["key"], "secret_access_key": given.get("secret", "")}
        return options | keys | ({"session_token": given["token"]} if given.get("token") else {})
    return options | {"credential_provider": _boto_credentials(session)}


def _s3_endpoint() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _boto_credentials(session: Any) -> Callable[[], Options]:
    """Return a function that obstore calls for keys, first and whenever its keys expire."""

    def credentials() -> Options:
        found = session.get_credentials()
        if found is None:
            raise PermissionError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws")
        keys = found.get_frozen_credentials()
        remember(keys.access_key, keys.secret_key, keys.token)
        return {
            "access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token,
            "expires_at": getattr(found, "_expiry_time", None),
        }  # fmt: skip

    return credentials


def google(bucket: str, common: Options) -> Any:
    """Return obstore's store of a bucket of Google Cloud Storage.

    Keys are the application default credentials of google-auth: GOOGLE_APPLICATION_CREDENTIALS, gcloud's, the
    machine's. An ``endpoint_url`` of fsspec's configuration is asked without keys unless a token is configured too.

    Raises `ValueError` if there are no credentials.
    """
    from obstore.store import GCSStore

    return GCSStore(bucket, **common, **google_options())


def google_options() -> Options:
    """Return obstore's options for Google Cloud Storage, from the configuration of google-auth and fsspec."""
    given = _configured("gs", "gcs")
    endpoint, token = given.get("endpoint_url"), given.get("token")
    options = {"base_url": endpoint} if endpoint else {}
    if token == "anon":
        return options | {"skip_signature": True}
    if endpoint and not token:
        return options | {"credential_provider": _no_credentials}
    if isinstance(token, str) and token.endswith(".json"):
        return options | {"application_credentials": token}
    return options | {"credential_provider": _google_credentials()}


def _no_credentials() -> Options:
    return {"token": "none", "expires_at": None}  # with skip_signature obstore would sign its writes all the same


def _google_credentials() -> Callable[[], Options]:
    auth: Any = importlib.import_module("google.auth")
    try:
        found, _ = auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except auth.exceptions.DefaultCredentialsError as error:
        raise ValueError(
            "no Google credentials: set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`"
        ) from error
    provider: Any = importlib.import_module("obstore.auth.google").GoogleCredentialProvider
    made: Callable[[], Options] = provider(found)
    return made


def azure(container: str, common: Options) -> Any:
    """Return obstore's store of a container of Azure's blobs.

    Account and keys are found as adlfs finds them: ``container@account.dfs.core.windows.net`` in the URL, fsspec's
    configuration, AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or
    AZURE_STORAGE_CONNECTION_STRING; and without a key the default credentials of azure-identity.

    `container`: with or without the account behind ``@``.
    Raises `ValueError` if no account is named.
    """
    from obstore.store import AzureStore

    name, _, host = container.partition("@")
    return AzureStore(name, **common, **azure_options(host.partition(".")[0]))


def azure_options(account: str = "") -> Options:
    """Return obstore's options for Azure, from adlfs' configuration; an `account` in the URL comes first."""
    given = _configured("az", "abfs", "abfss")

    def find(option: str) -> str | None:
        return given.get(option) or os.environ.get(f"AZURE_STORAGE_{option.upper()}")

    pairs = (part.partition("=") for part in (find("connection_string") or "").split(";"))
    connection = {name: value for name, _, value in pairs}
    remember(connection.get("AccountKey"), connection.get("SharedAccessSignature"))
    account = account or find("account_name") or connection.get("AccountName", "")
    if not account:
        raise ValueError(
            "no storage account: set AZURE_STORAGE_ACCOUNT_NAME, or write az://CONTAINER@ACCOUNT.dfs.core.windows.net/..."
        )
    options: Options = {"account_name": account}
    if endpoint := connection.get("BlobEndpoint"):
        options["endpoint"] = endpoint
    if key := find("account_key") or connection.get("AccountKey"):
        return options | {"account_key": key}
    if sas := find("sas_token") or connection.get("SharedAccessSignature"):
        return options | {"sas_key": sas}
    if find("anon") in (True, "true", "True", "1"):
        return options | {"skip_signature": True}
    provider: Any = importlib.import_module("obstore.auth.azure").AzureCredentialProvider
    return options | {"credential_provider": provider()}


def _configured(*schemes: str) -> Options:
    """Return fsspec's configuration of the first of some schemes that has one."""
    from fsspec.config import conf

    return next((dict(conf[scheme]) for scheme in schemes if conf.get(scheme)), {})
